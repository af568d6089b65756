"""The files of a model directory that is to be written: where its tensors will be, and all that is not weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from distprune.checkpoint.hf_directory import (
    CONFIG_NAME,
    DTYPES,
    INDEX_NAME,
    HfDirectory,
    TensorEntry,
    WeightFile,
    read_json,
)
from distprune.shards import LocalShard

__all__ = ["allocate", "allocate_directory", "check_space", "planned", "write_small_files"]

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8  # bytes: where the safetensors library lets the data begin
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def planned(target: Path, file: WeightFile, tensors: dict[str, LocalShard]) -> WeightFile:
    """Return the weight file to write: the source's tensors in the source's order, in the model's dtypes."""
    entries: list[TensorEntry] = []
    position = 0
    for shard in (tensors[entry.name] for entry in file.tensors if entry.name in tensors):
        stop = position + shard.geometry.global_numel * shard.local.element_size()
        entries.append(TensorEntry(shard.name, shard.local.dtype, shard.geometry.global_shape, position, stop))
        position = stop
    start = len(_header(entries))
    placed = tuple(replace(entry, start=start + entry.start, stop=start + entry.stop) for entry in entries)
    return WeightFile(target / file.path.name, placed)


def _header(entries: Sequence[TensorEntry]) -> bytes:
    """Return the safetensors header before ``entries``."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        offsets = [entry.start - entries[0].start, entry.stop - entries[0].start]
        table[entry.name] = {"dtype": _CODES[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def allocate_directory(
    source: HfDirectory, files: list[WeightFile], target: Path, tensors: dict[str, LocalShard]
) -> None:
    """Make ``files`` at their full size in ``target``, and copy what is not weights. Local; for one rank.

    Of weight files that are there the weights stay; headers and small files are written anew.

    Raises:
        OSError: the disk is full or not writable.
    """
    check_space(target, files)
    # Of weights that only their owner may read, the copy is such, too.
    target.chmod(target.stat().st_mode & source.path.stat().st_mode | stat.S_IRWXU)
    for file, read in zip(files, source.weight_files, strict=True):
        allocate(file, read.path)
    write_small_files(source, files, target, tensors)


def check_space(target: Path, files: list[WeightFile]) -> None:
    """Raise ``OSError`` unless there is room for ``files``."""
    there = sum(file.path.stat().st_size for file in files if file.path.exists())
    wanted, free = sum(map(_size, files)) - there, shutil.disk_usage(target).free
    if wanted > free:
        raise OSError(f"{target} has {free} bytes free, the model needs {wanted}")


def _size(file: WeightFile) -> int:
    return file.tensors[-1].stop if file.tensors else len(_header([]))


def allocate(file: WeightFile, read: Path) -> None:
    """Write the header and take the space, so that a full disk is found before anything else is written.

    Of a file that is there the weights stay.
    """
    _write_file(file.path, _header(file.tensors), read, _size(file))
    with file.path.open("r+b") as handle:
        try:
            os.posix_fallocate(handle.fileno(), 0, _size(file))
        except (AttributeError, NotImplementedError):
            pass
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise OSError(error.errno, f"cannot write {file.path}: {error.strerror}") from error
        os.fsync(handle.fileno())


def write_small_files(
    source: HfDirectory, files: list[WeightFile], target: Path, tensors: dict[str, LocalShard]
) -> None:
    """Copy what is not weights; the config then says the dtype, and the index the sizes, that are written."""
    for path in source.small_files:
        _write_file(target / path.name, path.read_bytes(), path)
    config = read_json(source.path / CONFIG_NAME)
    dtypes = {str(shard.local.dtype) for shard in tensors.values() if shard.local.dtype.is_floating_point}
    stated = [key for key in ("dtype", "torch_dtype") if key in config]
    if len(dtypes) == 1 and stated:
        config.update(dict.fromkeys(stated, dtypes.pop().removeprefix("torch.")))
        _write_file(target / CONFIG_NAME, f"{json.dumps(config, indent=2)}\n".encode(), source.path / CONFIG_NAME)
    if source.is_indexed:
        written = [(entry, file.path.name) for file in files for entry in file.tensors]
        total = sum(entry.stop - entry.start for entry, _ in written)
        index = {
            "metadata": {**source.index_metadata, "total_size": total},
            "weight_map": {entry.name: name for entry, name in written},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        _write_file(target / INDEX_NAME, text.encode(), source.path / INDEX_NAME)


def _write_file(path: Path, content: bytes, read: Path, size: int | None = None) -> None:
    """Write the beginning of a file of ``size`` bytes (``None``: all of it).

    No more people may read it than the file ``read`` that it is made from.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, stat.S_IMODE(read.stat().st_mode) | stat.S_IWUSR)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.truncate(len(content) if size is None else size)
