"""A Hugging Face model directory: which tensors it holds, in which file, at which bytes.

Nouns: a *weight file* is a ``.safetensors`` file; the *index* maps tensor names to weight files where
there are several; *small files* are everything else that makes the directory a model (config,
generation config, tokenizer, templates) and is carried along as it is.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["HfDirectory", "TensorEntry", "WeightFile", "open_directory"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_NOT_CARRIED = frozenset({INDEX_NAME, "pytorch_model.bin.index.json", "report.json", "report.png", "journal.json"})
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of every weight file
_MAX_SMALL_FILE = 256 << 20  # bytes; nothing a tokenizer or a config comes near

# https://github.com/huggingface/safetensors: 8 bytes little-endian length, then that much JSON.
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 100_000_000  # bytes, the limit of the safetensors library

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a weight file; ``start`` and ``stop`` are bytes from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class WeightFile:
    """One weight file, its tensors in the order of their bytes."""

    path: Path
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True)
class HfDirectory:
    """What :func:`open_directory` found."""

    path: Path
    weight_files: tuple[WeightFile, ...]
    is_indexed: bool
    index_metadata: dict[str, Any]
    small_files: tuple[Path, ...]

    @property
    def tensors(self) -> dict[str, tuple[WeightFile, TensorEntry]]:
        """Every tensor by name."""
        return {entry.name: (file, entry) for file in self.weight_files for entry in file.tensors}

    def fingerprint(self) -> str:
        """Return a digest of the config and of all tensors' names, places, shapes and dtypes (not their values)."""
        parts = [(self.path / CONFIG_NAME).read_text()]
        parts += [f"{file.path.name}:{file.tensors}" for file in self.weight_files]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def sample(self) -> str:
        """Return a digest of bytes from all over the weight files, 256 KiB of each: tells models of one shape apart."""
        digest = hashlib.sha256()
        for file in self.weight_files:
            last = max(file.path.stat().st_size - _SAMPLE_BYTES, 0)
            with file.path.open("rb") as handle:
                for number in range(_NUM_SAMPLES):
                    handle.seek(last * number // (_NUM_SAMPLES - 1))
                    digest.update(handle.read(_SAMPLE_BYTES))
        return digest.hexdigest()


def open_directory(path: str | Path) -> HfDirectory:
    """Return what the model directory at ``path`` holds. Reads headers only; local, nothing is communicated.

    Raises:
        FileNotFoundError: no such directory, no config, no weights, or a weight file of the index is absent.
        NotADirectoryError: ``path`` is a file.
        ValueError: a weight file is truncated or corrupt, or the index is, names a file outside the
            directory, or a tensor that its file does not hold.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"there is no model directory {folder}")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a directory; name the directory that holds config.json")
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"{folder} is no model directory: it has no {CONFIG_NAME}")
    index_path, single_path = folder / INDEX_NAME, folder / SINGLE_NAME
    if index_path.is_file():
        weight_map, metadata = _read_index(index_path)
        files = tuple(read_weight_file(folder / name) for name in dict.fromkeys(weight_map.values()))
        _check_index(weight_map, files)
        return HfDirectory(folder, files, True, metadata, _small_files(folder))
    if single_path.is_file():
        return HfDirectory(folder, (read_weight_file(single_path),), False, {}, _small_files(folder))
    raise FileNotFoundError(f"{folder} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there")


def read_weight_file(path: Path) -> WeightFile:
    """Return the tensors of one safetensors file, its header checked against its size.

    Raises:
        ValueError: the file is truncated or not safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH.size)
        if len(prefix) < _LENGTH.size:
            raise ValueError(f"{path} is truncated: {size} bytes, too few for a safetensors header")
        (length,) = _LENGTH.unpack(prefix)
        if length > _MAX_HEADER:
            raise ValueError(f"{path} is corrupt or no safetensors file: its header claims {length} bytes")
        if _LENGTH.size + length > size:
            raise ValueError(f"{path} is truncated: {size} bytes, its header alone needs {_LENGTH.size + length}")
        text = file.read(length)
    data_start = _LENGTH.size + length
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = [_entry(name, value, data_start) for name, value in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is corrupt: its safetensors header cannot be read ({error})") from error
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    position = data_start
    for entry in entries:
        if entry.start != position:
            raise ValueError(f"{path} is corrupt: tensor {entry.name!r} does not begin where the one before it ends")
        position = entry.stop
    if position != size:
        state = "truncated" if position > size else "corrupt"
        raise ValueError(f"{path} is {state}: {size} bytes, its header calls for {position}")
    return WeightFile(path, tuple(entries))


def _entry(name: str, value: dict[str, Any], data_start: int) -> TensorEntry:
    if value["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} has the dtype {value['dtype']}, which is not supported")
    dtype, shape = DTYPES[value["dtype"]], tuple(int(size) for size in value["shape"])
    start, stop = (int(offset) for offset in value["data_offsets"])
    num_bytes = dtype.itemsize
    for size in shape:
        if size < 0:
            raise ValueError(f"tensor {name!r} has the shape {shape}")
        num_bytes *= size
    if start < 0 or stop - start != num_bytes:
        raise ValueError(f"tensor {name!r} of shape {shape} and dtype {dtype} cannot be {stop - start} bytes")
    return TensorEntry(name, dtype, shape, data_start + start, data_start + stop)


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        weight_map, metadata = index["weight_map"], index.get("metadata") or {}
        if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError("weight_map is empty or maps to something that is no file name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is corrupt: it is no index of weight files ({error})") from error
    for tensor, name in weight_map.items():
        # A name, not a path: an index from elsewhere must not make us read, or write beside, other files.
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{path} puts tensor {tensor!r} into {name!r}, which lies outside the model directory")
        if not name.endswith(".safetensors"):
            raise ValueError(f"{path} puts tensor {tensor!r} into {name!r}, which is no safetensors file")
        if not (path.parent / name).is_file():
            raise FileNotFoundError(f"{path} names the weight file {name!r}, which is not there")
    return weight_map, metadata


def _check_index(weight_map: dict[str, str], files: tuple[WeightFile, ...]) -> None:
    held = {(file.path.name, entry.name) for file in files for entry in file.tensors}
    for tensor, name in weight_map.items():
        if (name, tensor) not in held:
            raise ValueError(f"the index puts tensor {tensor!r} into {name!r}, which does not hold it")
    unlisted = sorted(tensor for name, tensor in held if tensor not in weight_map)
    if unlisted:
        raise ValueError(f"the weight files hold tensors that the index does not list: {unlisted[:5]}")


def _small_files(folder: Path) -> tuple[Path, ...]:
    return tuple(
        sorted(
            path
            for path in folder.iterdir()
            if path.is_file()
            and not path.name.endswith(_WEIGHT_SUFFIXES)
            and path.name not in _NOT_CARRIED
            and path.stat().st_size <= _MAX_SMALL_FILE
        )
    )
