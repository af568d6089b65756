"""The files of a model directory that is to be written: where its tensors will be, and all that is not weights."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.disk import write_whole
from distprune.checkpoint.hf_directory import (
    CONFIG_NAME,
    DTYPES,
    INDEX_NAME,
    SINGLE_NAME,
    HfDirectory,
    TensorEntry,
    WeightFile,
    read_json,
)

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8  # bytes: where the safetensors library lets the data begin


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


def write_small_files(
    source: HfDirectory,
    files: Sequence[WeightFile],
    target: Path,
    config: dict[str, Any] | None = None,
) -> None:
    """Write into ``target`` all but its weight ``files``: what ``source`` has beside its weights, and an index.

    The config says the dtype, and the index the sizes, that are written; a single file needs none. ``config``: of a
    model of other sizes than the source's; ``None``: the source's own. Local; for one rank.

    Raises:
        OSError: the disk is full or not writable.
    """
    # A directory that only its owner may enter has such a copy.
    target.chmod(target.stat().st_mode & source.path.stat().st_mode | stat.S_IRWXU)
    for path in source.small_files:
        copy = target / path.relative_to(source.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_whole(copy, path.read_bytes(), sync=False)
    written = [(entry, file.path.name) for file in files for entry in file.tensors]
    before = read_json(source.path / CONFIG_NAME)
    now = {**(before if config is None else config)}
    dtypes = {str(entry.dtype) for entry, _ in written if entry.dtype.is_floating_point}
    if len(dtypes) == 1:
        dtype = dtypes.pop().removeprefix("torch.")
        now.update({key: dtype for key in ("dtype", "torch_dtype") if key in now})
    if now != before:
        write_whole(target / CONFIG_NAME, f"{json.dumps(now, indent=2)}\n".encode(), sync=False)
    if [file.path.name for file in files] != [SINGLE_NAME]:
        metadata = {**source.index_metadata, "total_size": sum(entry.stop - entry.start for entry, _ in written)}
        if config is not None and "total_parameters" in metadata:
            metadata["total_parameters"] = sum(math.prod(entry.shape) for entry, _ in written)
        index = {"metadata": metadata, "weight_map": {entry.name: name for entry, name in written}}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_whole(target / INDEX_NAME, text.encode(), sync=False)
