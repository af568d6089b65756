"""The parts of stored tensors that a rank holds: read and written at their places in safetensors files.

Ranks write side by side, each its own elements. The bytes are the same whatever the number of ranks and the layout, so
any other number of ranks can read them.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from distprune.checkpoint.disk import sync_file
from distprune.checkpoint.outputs import writing
from distprune.checkpoint.weight_file import TensorEntry, WeightFile, begin_file, open_weights, planned
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.slow import work_together
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, bytes_of, cut, flat_chunk
from distprune.shards.staged import fetch_in_turn, send_in_turn

ROWS_TOGETHER = 8  # of a matrix: it is cut at multiples of so many
_COPY_BYTES = 8 << 20  # read at a time; what is mapped from the file is not counted as ours
_WRITE_BYTES = 8 << 20  # written at a time
_SCATTERED_ELEMENTS = 1 << 18  # placed at a time where they do not lie side by side

Stored: TypeAlias = tuple[LocalShard, WeightFile, TensorEntry]  # a shard, and where its tensor is stored
Progress: TypeAlias = Callable[[int, int], None] | None  # is told how many bytes are done, of how many in all
Slices: TypeAlias = Iterator[tuple[torch.Tensor, torch.Tensor]]  # (rows of the local tensor, what is stored there)
Stretch: TypeAlias = tuple[int, int, int]  # flat index in the whole tensor; start and stop in the chunk


def stored_slices(
    work: Sequence[Stored], progress: Progress = None
) -> Iterator[tuple[LocalShard, TensorEntry, Slices]]:
    """Yield every shard of ``work`` with its slices, which are to be read before the next one is asked for. Local.

    Raises:
        ValueError: a file is no safetensors file.
    """
    num_done, num_total = 0, sum(shard.local.nbytes for shard, _, _ in work)
    in_order = sorted(work, key=lambda stored: (stored[1].path, stored[2].start))
    for path, of_file in itertools.groupby(in_order, key=lambda stored: stored[1].path):
        with open_weights(path) as handle:
            for shard, _, entry in of_file:
                yield shard, entry, _parts(shard, entry, handle)
                num_done += shard.local.nbytes
                if progress is not None:
                    progress(num_done, num_total)


def fill_shards(work: Sequence[Stored], progress: Progress = None) -> None:
    """Read every shard of ``work`` in place. Local; raises as :func:`stored_slices`."""
    send_in_turn(pair for _, _, slices in stored_slices(work, progress) for pair in slices)


def _parts(shard: LocalShard, entry: TensorEntry, file: Any) -> Slices:
    """Yield (rows of the local tensor, what is stored there), a bounded number of rows at a time."""
    if shard.local.numel() == 0:
        return
    stored = file.get_tensor(entry.name).reshape(shard.geometry.global_shape)  # mapped; flat, as FSDP1 has it
    if not stored.ndim:
        yield shard.local, stored
        return
    step = max(1, _COPY_BYTES // (shard.local[0].numel() * entry.dtype.itemsize))
    if stored.ndim == 2:
        step = -(-step // ROWS_TOGETHER) * ROWS_TOGETHER
    local_start = 0
    for run_start, run_stop in shard.geometry.dim_runs[0]:
        for start in range(run_start, run_stop, step):
            rows = stored[start : min(start + step, run_stop)]
            part = Geometry(tuple(rows.shape), (((0, len(rows)),), *shard.geometry.dim_runs[1:]))
            yield shard.local[local_start : local_start + len(rows)], cut(rows, part)
            local_start += len(rows)


def write_shards(path: Path, parts: Sequence[tuple[LocalShard, TensorEntry]], progress: Progress = None) -> None:
    """Write every shard of ``parts`` to its place in the file ``path``. Local; raises as :func:`write_chunk`."""
    num_done, num_total = 0, sum(shard.local.nbytes for shard, _ in parts)
    with path.open("r+b", buffering=0) as handle:
        for shard, entry in parts:
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


def write_chunk(descriptor: int, entry: TensorEntry, values: torch.Tensor, stretches: list[Stretch]) -> None:
    """Write a chunk of the tensor ``entry`` to its places in the file. Local.

    Raises:
        OSError: the disk is full or not writable, or ``values`` are mapped and their file has become shorter; it names
            the tensor.
    """
    data, itemsize = bytes_of(values).data, entry.dtype.itemsize
    try:
        for flat_start, low, high in stretches:
            _write_at(descriptor, data[low * itemsize : high * itemsize], entry.start + flat_start * itemsize)
    except OSError as error:
        if error.errno == errno.EFAULT:  # no memory of ours: a file that is mapped
            raise OSError(f"cannot read {entry.name!r}: its file has become shorter while it was read") from error
        raise OSError(error.errno, f"cannot write {entry.name!r}: {error.strerror}") from error


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def write_together(
    comm: Communicator,
    target: str | Path,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    parts: Sequence[LocalShard],
    *,
    overwrite: bool = False,
) -> None:
    """Write tensors of ``shapes`` to the file ``target``, of which ``parts`` are what this rank has to write.

    Its bytes do not depend on the layout. Every rank must call it, and see ``target``. Rounds: those of
    :func:`writing`, one of 64 bytes, and those of :func:`work_together`.

    Raises:
        OSError, ValueError: on every rank, nothing changed: as :func:`writing`.
    """
    with writing(target, comm, overwrite=overwrite, is_file=True) as staging:
        with together(comm):
            file = planned(staging, [(name, dtype, shape) for name, shape in shapes.items()])
            places = {entry.name: entry for entry in file.tensors}
            if comm.rank == 0:
                begin_file(file)

        def write() -> None:
            write_shards(staging, [(part, places[part.name]) for part in parts])
            sync_file(staging)

        work_together(comm, write)


def stored_in(file: WeightFile, shards: Sequence[LocalShard]) -> list[Stored]:
    """Return where in ``file`` this rank's ``shards`` of the tensors of their names lie. Local.

    Raises:
        ValueError: a tensor is missing, or has another shape or dtype; the file is no safetensors file.
    """
    stored = {entry.name: entry for entry in file.tensors}
    for shard in shards:
        entry = stored.get(shard.name)
        if entry is None or (entry.shape, entry.dtype) != (shard.shape, shard.local.dtype):
            held = "nothing" if entry is None else f"{entry.dtype} {entry.shape}"
            wanted = f"{shard.local.dtype} {tuple(shard.shape)}"
            raise ValueError(f"{file.path} holds {held} under {shard.name!r}, where {wanted} is called for")
    return [(shard, file, stored[shard.name]) for shard in shards]
