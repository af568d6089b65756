"""Directories that are no models are told apart before anything is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from distprune.checkpoint.hf_directory import open_directory
from tests.hf_models import make_model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NORM = "model.norm.weight"  # a tensor


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    one = open_directory(make_model(tmp_path / "a")).fingerprint()
    assert open_directory(make_model(tmp_path / "b")).fingerprint() == one
    assert open_directory(make_model(tmp_path / "c", tied=False)).fingerprint() != one


def loop(path: Path) -> None:
    path.symlink_to(path)


def config_alone(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


NO_MODELS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "nothing": (lambda _: None, FileNotFoundError, "no model directory"),
    "a loop of links": (loop, FileNotFoundError, "no model directory"),
    "a file": (Path.touch, NotADirectoryError, "not a directory"),
    "empty": (Path.mkdir, FileNotFoundError, r"has no config\.json"),
    "no weights": (config_alone, FileNotFoundError, r"holds no weights.*pytorch_model\.bin .* anew by save_pretrained"),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_no_models(tmp_path: Path, name: str) -> None:
    make, error, message = NO_MODELS[name]
    make(tmp_path / "model")
    with pytest.raises(error, match=message):
        open_directory(tmp_path / "model")


def cut_to(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:size]


def damaged_at(place: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + b"\xff" * 6 + content[place + 6 :]


def with_entry(**entry: object) -> Callable[[bytes], bytes]:
    header = json.dumps({"w": entry}).encode()
    return lambda _: len(header).to_bytes(8, "little") + header + b"\0" * 8


CORRUPT: dict[str, Callable[[bytes], bytes]] = {
    **{f"cut to {size}": cut_to(size) for size in (0, 4, 100, -1)},
    **{f"damaged at {place}": damaged_at(place) for place in (0, 8, 30)},
    "more than the header says": lambda content: content + b"\0",
    "too few bytes": with_entry(dtype="F32", shape=[3], data_offsets=[0, 8]),
    "negative": with_entry(dtype="F32", shape=[-2], data_offsets=[0, -8]),
    "no such dtype": with_entry(dtype="X9", shape=[2], data_offsets=[0, 8]),
    "no offsets": with_entry(dtype="F32", shape=[2]),
    "a hole": with_entry(dtype="F32", shape=[1], data_offsets=[4, 8]),
}


@pytest.mark.parametrize("damage", CORRUPT)
def test_corrupt_weights(tmp_path: Path, damage: str) -> None:
    path = make_model(tmp_path) / SINGLE
    path.write_bytes(CORRUPT[damage](path.read_bytes()))
    with pytest.raises(ValueError, match="is corrupt or truncated"):
        open_directory(tmp_path)


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", max_shard_size="10KB")


def file_of(folder: Path, tensor: str) -> str:
    return str(json.loads((folder / INDEX).read_text())["weight_map"][tensor])


def another_file(folder: Path) -> str:
    return next(path.name for path in sorted(folder.glob("*.safetensors")) if path.name != file_of(folder, NORM))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("model-99999-of-99999.safetensors", FileNotFoundError, "not there"),
        ("../outside.safetensors", ValueError, "outside the model directory"),
        ("/etc/outside.safetensors", ValueError, "outside the model directory"),
        ("deep/inside.safetensors", ValueError, "outside the model directory"),
        ("..", ValueError, "outside the model directory"),
        ("pytorch_model.bin", ValueError, "no safetensors file"),
        ("another", ValueError, "does not hold it"),
    ],
)
def test_an_index_that_puts_a_tensor_elsewhere(indexed: Path, name: str, error: type[Exception], message: str) -> None:
    for other in (indexed.parent / "outside.safetensors", indexed / "pytorch_model.bin"):
        other.touch()
    index = json.loads((indexed / INDEX).read_text())
    index["weight_map"][NORM] = another_file(indexed) if name == "another" else name
    (indexed / INDEX).write_text(json.dumps(index))
    with pytest.raises(error, match=message):
        open_directory(indexed)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_index_that_is_no_index(indexed: Path, text: str) -> None:
    (indexed / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is corrupt"):
        open_directory(indexed)


@pytest.mark.parametrize("difference", [0, 1])
def test_a_tensor_in_two_files(indexed: Path, difference: float) -> None:
    right, other = file_of(indexed, NORM), another_file(indexed)
    tensors = load_file(indexed / other) | {NORM: load_file(indexed / right)[NORM] + difference}
    save_file(tensors, indexed / other, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"'{NORM}' is in '{other}', and .*{right}"):
        open_directory(indexed)


def test_a_single_file_beside_an_index(indexed: Path) -> None:
    (indexed / SINGLE).write_bytes(next(indexed.glob("*.safetensors")).read_bytes())
    with pytest.raises(ValueError, match="holds two models"):
        open_directory(indexed)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_links_out_of_the_directory(tmp_path: Path, name: str) -> None:
    folder, secret = make_model(tmp_path / "model"), tmp_path / "secret"
    secret.write_bytes((folder / "config.json").read_bytes())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(ValueError, match=rf"{name} is a link out of the model directory, to {secret}"):
        open_directory(folder)


def test_links_inside_of_the_directory(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "config.json").rename(folder / "config-2.json")
    (folder / "config.json").symlink_to("config-2.json")
    (folder / "loop.json").symlink_to("loop.json")
    (folder / "nowhere.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(folder)
    small = {path.name for path in open_directory(tmp_path / "link").small_files}
    assert small == {"config.json", "config-2.json", "generation_config.json"}


@pytest.mark.parametrize("cache", ["models--org--name", "other"])
def test_the_cache_of_the_hub(tmp_path: Path, cache: str) -> None:
    """Its files are links into a folder of blobs beside the snapshots; those of another model are none of its own."""
    home = tmp_path / "models--org--name"
    folder = make_model(home / "snapshots" / "0123abc", max_shard_size="10KB")
    blobs = tmp_path / cache / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path(os.path.relpath(blobs / str(number), folder)))
    if cache == "other":
        with pytest.raises(ValueError, match="link out of the model directory"):
            open_directory(folder)
    else:
        assert len(open_directory(folder).weight_files) > 1
