"""Directories that are no models are told apart before anything is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from distprune.checkpoint.hf_directory import open_directory
from tests.hf_models import make_model


def test_describes_single_file(tmp_path: Path) -> None:
    directory = open_directory(make_model(tmp_path))
    assert not directory.is_indexed
    (file,) = directory.weight_files
    assert file.path.stat().st_size == file.tensors[-1].stop
    assert {path.name for path in directory.small_files} == {"config.json", "generation_config.json"}


def test_describes_several_files(tmp_path: Path) -> None:
    directory = open_directory(make_model(tmp_path, max_shard_size="10KB"))
    assert directory.is_indexed
    assert len(directory.weight_files) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert {name: file.path.name for name, (file, _) in directory.tensors.items()} == index["weight_map"]


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    one = open_directory(make_model(tmp_path / "a")).fingerprint()
    assert open_directory(make_model(tmp_path / "b")).fingerprint() == one
    assert open_directory(make_model(tmp_path / "c", tied=False)).fingerprint() != one


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no model directory"):
        open_directory(tmp_path / "nothing")


def test_file_instead_of_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="not a directory"):
        open_directory(tmp_path / "file")


def test_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        open_directory(tmp_path)


def test_directory_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        open_directory(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_file(tmp_path: Path, size: int) -> None:
    path = make_model(tmp_path) / "model.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    with pytest.raises(ValueError, match="truncated"):
        open_directory(tmp_path)


def test_file_with_more_than_its_header_says(tmp_path: Path) -> None:
    path = make_model(tmp_path) / "model.safetensors"
    with path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ValueError, match="is corrupt"):
        open_directory(tmp_path)


@pytest.mark.parametrize("place", [0, 8, 30])
def test_corrupt_header(tmp_path: Path, place: int) -> None:
    path = make_model(tmp_path) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place : place + 6] = b"\xff" * 6
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is corrupt"):
        open_directory(tmp_path)


def write_header(path: Path, header: dict[str, object], num_data: int) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * num_data)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},  # fewer bytes than the shape needs
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]},
        {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},  # a hole
    ],
)
def test_header_that_contradicts_itself(tmp_path: Path, entry: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_header(tmp_path / "model.safetensors", {"w": entry}, 8)
    with pytest.raises(ValueError, match="is corrupt"):
        open_directory(tmp_path)


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model", max_shard_size="10KB")


def change_index(folder: Path, name: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(index))


def test_index_names_a_file_that_is_absent(indexed: Path) -> None:
    change_index(indexed, "model-99999-of-99999.safetensors")
    with pytest.raises(FileNotFoundError, match="not there"):
        open_directory(indexed)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "deep/inside.safetensors", ".."]
)
def test_index_names_a_file_outside(indexed: Path, name: str) -> None:
    (indexed.parent / "outside.safetensors").write_bytes((indexed / "config.json").read_bytes())
    change_index(indexed, name)
    with pytest.raises(ValueError, match="outside the model directory"):
        open_directory(indexed)


def test_index_names_a_pickle(indexed: Path) -> None:
    (indexed / "pytorch_model.bin").touch()
    change_index(indexed, "pytorch_model.bin")
    with pytest.raises(ValueError, match="no safetensors file"):
        open_directory(indexed)


def test_index_names_a_tensor_that_its_file_does_not_hold(indexed: Path) -> None:
    wrong = sorted(path.name for path in indexed.glob("*.safetensors"))[0]
    change_index(indexed, wrong)
    with pytest.raises(ValueError, match="does not hold it"):
        open_directory(indexed)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_index_that_is_no_index(indexed: Path, text: str) -> None:
    (indexed / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index\.json is corrupt"):
        open_directory(indexed)


def copy_tensor(folder: Path, name: str, file: str, difference: float) -> None:
    tensors, more = load_file(folder / file), load_file(folder / find(folder, name))
    save_file({**tensors, name: more[name] + difference}, folder / file, {"format": "pt"})


def find(folder: Path, tensor: str) -> str:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return str(index["weight_map"][tensor])


@pytest.mark.parametrize("difference", [0, 1])
def test_a_tensor_in_two_files(indexed: Path, difference: float) -> None:
    name = "model.norm.weight"
    other = next(path.name for path in sorted(indexed.glob("*.safetensors")) if path.name != find(indexed, name))
    copy_tensor(indexed, name, other, difference)
    with pytest.raises(ValueError, match=rf"'{name}' is in '{other}', and .*{find(indexed, name)}"):
        open_directory(indexed)


def test_a_single_file_beside_an_index(indexed: Path) -> None:
    (indexed / "model.safetensors").write_bytes(next(indexed.glob("*.safetensors")).read_bytes())
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


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FileNotFoundError, match="no model directory"):
        open_directory(tmp_path / "loop")
