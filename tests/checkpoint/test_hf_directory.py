"""Directories that are no models are told apart before anything is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from distprune.checkpoint import open_directory
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
    with pytest.raises(ValueError, match="is truncated"):
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
