"""One safetensors file that ranks write side by side: each its own elements, at their places.

The bytes are the same whatever the number of ranks and the layout, so any other number of ranks can read it.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from distprune.checkpoint.hf_directory import TensorEntry
from distprune.checkpoint.stored_slices import Progress, Stored
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, bytes_of, flat_chunk
from distprune.shards.staged import fetch_in_turn

Stretch: TypeAlias = tuple[int, int, int]  # flat index in the whole tensor; start and stop in the chunk

_WRITE_BYTES = 8 << 20  # written at a time
_SCATTERED_ELEMENTS = 1 << 18  # placed at a time where they do not lie side by side


def write_shards(work: Sequence[Stored], progress: Progress = None) -> None:
    """Write every shard of ``work``, by files, to its places. Local; raises as :func:`write_chunk`."""
    num_done, num_total = 0, sum(shard.local.nbytes for shard, _, _ in work)
    for path, of_file in itertools.groupby(work, key=lambda stored: stored[1].path):
        with path.open("r+b", buffering=0) as handle:
            for shard, _, entry in of_file:
                for values, stretches in chunks_of(shard):
                    write_chunk(handle.fileno(), entry, values, stretches)
                    num_done += values.nbytes
                    if progress is not None:
                        progress(num_done, num_total)


def chunks_of(shard: LocalShard) -> Iterator[tuple[torch.Tensor, list[Stretch]]]:
    """Yield the shard's elements, some at a time, on the CPU, with the stretches that lie side by side in the whole.

    Each chunk until the next one is asked for, which is on its way meanwhile.
    """
    # Scattered elements need eight bytes of place each, several times over.
    is_one = shard.geometry.flat_start is not None
    step = max(1, _WRITE_BYTES // shard.local.element_size()) if is_one else _SCATTERED_ELEMENTS
    numel = shard.local.numel()
    bounds = [(start, min(start + step, numel)) for start in range(0, numel, step)]
    chunks = fetch_in_turn(flat_chunk(shard.local, start, stop) for start, stop in bounds)
    for chunk, (start, stop) in zip(chunks, bounds, strict=True):
        yield chunk.contiguous(), stretches_of(shard.geometry, start, stop)


def stretches_of(geometry: Geometry, start: int, stop: int) -> list[Stretch]:
    """Return where the elements from local offset ``start`` to ``stop`` lie side by side in the whole. Local."""
    if geometry.flat_start is not None:
        return [(geometry.flat_start + start, 0, stop - start)]
    flat = geometry.flat_indices(start, stop)
    breaks = np.flatnonzero(np.diff(flat) != 1) + 1
    bounds = [0, *breaks.tolist(), stop - start]
    return [(int(flat[low]), low, high) for low, high in itertools.pairwise(bounds)]


def write_chunk(
    descriptor: int, entry: TensorEntry, values: torch.Tensor | npt.NDArray[Any], stretches: list[Stretch]
) -> None:
    """Write a chunk of the tensor ``entry``, or its bits, to its places in the file. Local.

    Raises:
        OSError: the disk is full or not writable, or ``values`` are mapped and their file has become shorter; it names
            the tensor.
    """
    written, itemsize = bytes_of(values), entry.dtype.itemsize
    data = written.data
    try:
        for flat_start, low, high in stretches:
            _write_at(descriptor, data[low * itemsize : high * itemsize], entry.start + flat_start * itemsize)
    except OSError as error:
        if error.errno == errno.EFAULT and (path := mapped_file_at(written.ctypes.data)):
            raise OSError(f"cannot read {entry.name!r}: {path} has become shorter while it was read") from error
        raise OSError(error.errno, f"cannot write {entry.name!r}: {error.strerror}") from error


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def mapped_file_at(address: int) -> str:
    """Return the path of the file that this process has mapped to where ``address`` is, or ``""``. Linux; local."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                bounds, *others = line.split(maxsplit=5)
                start, stop = (int(bound, 16) for bound in bounds.split("-"))
                if start <= address < stop:
                    return others[4].strip() if len(others) == 5 else ""
    except OSError:  # another system
        pass
    return ""
