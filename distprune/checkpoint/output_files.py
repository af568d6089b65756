"""The files of a model directory that is to be written: where its tensors will be, and all that is not weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
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

__all__ = ["allocate", "check_space", "planned", "write_small_files"]

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8  # bytes: where the safetensors library lets the data begin
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def planned(target: Path, file: WeightFile, tensors: dict[str, LocalShard]) -> WeightFile:
    """Return the weight file to write: the source's tensors in the source's order, in the model's dtypes."""
    entries, position = [], 0
    for entry in file.tensors:
        if entry.name not in tensors:
            continue
        shard = tensors[entry.name]
        num_bytes = shard.geometry.global_numel * shard.local.element_size()
        shape = shard.geometry.global_shape
        entries.append(TensorEntry(entry.name, shard.local.dtype, shape, position, position + num_bytes))
        position += num_bytes
    start = len(_header(entries))
    placed = tuple(TensorEntry(e.name, e.dtype, e.shape, start + e.start, start + e.stop) for e in entries)
    return WeightFile(target / file.path.name, placed)


def _header(entries: list[TensorEntry]) -> bytes:
    """Return a safetensors header for ``entries``, whose first one begins at byte 0 of the data."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for entry in entries:
        table[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


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
    start = file.tensors[0].start if file.tensors else 0
    entries = [TensorEntry(e.name, e.dtype, e.shape, e.start - start, e.stop - start) for e in file.tensors]
    _write_file(file.path, _header(entries), read, _size(file))
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
    for path in source.small_files:
        _write_file(target / path.name, path.read_bytes(), path)
    config = read_json(source.path / CONFIG_NAME)
    dtypes = {str(shard.local.dtype) for shard in tensors.values() if shard.local.dtype.is_floating_point}
    stated = [key for key in ("dtype", "torch_dtype") if key in config]
    if len(dtypes) == 1 and stated:
        config.update(dict.fromkeys(stated, dtypes.pop().removeprefix("torch.")))
        _write_file(target / CONFIG_NAME, f"{json.dumps(config, indent=2)}\n".encode(), source.path / CONFIG_NAME)
    if source.is_indexed:
        total = sum(entry.stop - entry.start for file in files for entry in file.tensors)
        index = {
            "metadata": {**source.index_metadata, "total_size": total},
            "weight_map": {entry.name: file.path.name for file in files for entry in file.tensors},
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
