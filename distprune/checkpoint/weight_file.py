"""A weight file: the tensors of a ``.safetensors`` file, read where they lie and planned where they will."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.optional_packages import import_extra

WEIGHT_SUFFIX = ".safetensors"
_POINTER = b"version https://git-lfs"  # what a file begins with that git has instead of the weights
_ALIGNMENT = 8  # bytes: where the safetensors library lets the data begin

_DTYPES: dict[str, torch.dtype] = {
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
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


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


def read_weight_file(path: Path) -> WeightFile:
    """Return the tensors of one safetensors file. Local.

    Raises:
        ValueError: the file is truncated or not safetensors, or holds a dtype that is not supported.
    """
    with open_weights(path):  # checks the header, and its size against that of the file
        pass
    with path.open("rb") as file:
        # https://github.com/huggingface/safetensors: 8 bytes little-endian length, then that much JSON.
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = []
    for name, value in header.items():
        if value["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: tensor {name!r} has the dtype {value['dtype']}, which is not supported")
        start, stop = (8 + length + offset for offset in value["data_offsets"])
        entries.append(TensorEntry(name, _DTYPES[value["dtype"]], tuple(value["shape"]), start, stop))
    return WeightFile(path, tuple(sorted(entries, key=lambda entry: (entry.start, entry.stop))))


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Yield the open safetensors file ``path``. Local.

    Raises:
        OSError: it cannot be opened.
        ValueError: the safetensors library cannot read it.
    """
    safetensors = import_extra("safetensors", "hf")
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as handle:
            yield handle
    except FileNotFoundError:
        path.open("rb").close()  # the library calls any file that it cannot open missing
        raise
    except safetensors.SafetensorError as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
        what = "a pointer of Git LFS: git lfs pull fetches the file" if is_pointer else f"corrupt or truncated: {error}"
        raise ValueError(f"{path} is {what}") from error


def mapped_tensors(files: Sequence[WeightFile]) -> dict[str, torch.Tensor]:
    """Return all tensors of ``files`` by name, mapped: memory holds of them what the system keeps of the files. Local.

    Raises:
        ValueError: a file is no safetensors file.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with open_weights(file.path) as handle:
            tensors.update({entry.name: handle.get_tensor(entry.name) for entry in file.tensors})
    return tensors


def planned(path: Path, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> WeightFile:
    """Return the weight file to write at ``path``: ``tensors``, by name, dtype and shape, in this order."""
    entries: list[TensorEntry] = []
    stop = 0
    for name, dtype, shape in tensors:
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        entries.append(TensorEntry(name, dtype, tuple(shape), start, stop))
    size = len(header_of(entries))
    placed = (replace(entry, start=size + entry.start, stop=size + entry.stop) for entry in entries)
    return WeightFile(path, tuple(placed))


def header_of(entries: Sequence[TensorEntry]) -> bytes:
    """Return the safetensors header before ``entries``."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        offsets = [entry.start - entries[0].start, entry.stop - entries[0].start]
        table[entry.name] = {"dtype": _CODES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def begin_file(file: WeightFile) -> None:
    """Make ``file`` at its full size, with its header; what is there goes. Local; for one rank."""
    file.path.unlink(missing_ok=True)  # what a killed job has left, or a link
    file.path.write_bytes(header_of(file.tensors))
    if file.tensors:
        os.truncate(file.path, file.tensors[-1].stop)
