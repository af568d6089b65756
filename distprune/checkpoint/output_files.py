"""The files of a model directory that is to be written: where its tensors will be, and all that is not weights."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distprune.checkpoint.disk import write_whole
from distprune.checkpoint.hf_directory import (
    CONFIG_NAME,
    DTYPES,
    INDEX_NAME,
    HfDirectory,
    TensorEntry,
    WeightFile,
    read_json,
)
from distprune.shards.local_shard import LocalShard

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8  # bytes: where the safetensors library lets the data begin


def planned(path: Path, shards: Iterable[LocalShard]) -> WeightFile:
    """Return the weight file to write at ``path``: whole tensors in the order, the sizes and dtypes of ``shards``."""
    entries: list[TensorEntry] = []
    stop = 0
    for shard in shards:
        start, stop = stop, stop + shard.geometry.global_numel * shard.local.element_size()
        entries.append(TensorEntry(shard.name, shard.local.dtype, shard.geometry.global_shape, start, stop))
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


def check_room(target: Path, num_bytes: int) -> None:
    """Raise an OSError if the disk of the directory ``target`` has no room for so many bytes. Local."""
    free = shutil.disk_usage(target).free
    if num_bytes > free:
        raise OSError(f"{target} has {free} bytes free, the model needs {num_bytes}")


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
    num_removed: int = 0,
    *,
    is_indexed: bool,
) -> None:
    """Write into ``target`` all but its weight ``files``: what ``source`` has beside its weights, and an index.

    The config says the dtype, and the index the sizes, that are written. ``config``: of a model of other sizes than the
    source's, which has ``num_removed`` parameters less; ``None``: the source's own. Local; for one rank.

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
    config = {**(before if config is None else config)}
    dtypes = {str(entry.dtype) for entry, _ in written if entry.dtype.is_floating_point}
    if len(dtypes) == 1:
        dtype = dtypes.pop().removeprefix("torch.")
        config.update({key: dtype for key in ("dtype", "torch_dtype") if key in config})
    if config != before:
        write_whole(target / CONFIG_NAME, f"{json.dumps(config, indent=2)}\n".encode(), sync=False)
    if is_indexed:
        metadata = {**source.index_metadata, "total_size": sum(entry.stop - entry.start for entry, _ in written)}
        if isinstance(num_before := metadata.get("total_parameters"), int):
            metadata["total_parameters"] = num_before - num_removed
        index = {"metadata": metadata, "weight_map": {entry.name: name for entry, name in written}}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_whole(target / INDEX_NAME, text.encode(), sync=False)
