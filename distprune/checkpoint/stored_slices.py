"""The slices of stored tensors that a rank holds, read file by file in the order of their bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

from distprune.checkpoint.hf_directory import TensorEntry, WeightFile, open_weights
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, cut
from distprune.shards.staged import send_in_turn

_AHEAD_BYTES = 1 << 20  # read ahead at a time: of more Linux reads as much as a disk likes to, and forgets the rest
ROWS_TOGETHER = 8  # of a matrix: it is cut at multiples of so many
_COPY_BYTES = 8 << 20  # read at a time; what is mapped from the file is not counted as ours

Stored: TypeAlias = tuple[LocalShard, WeightFile, TensorEntry]  # a shard, and where its tensor is stored
Progress: TypeAlias = Callable[[int, int], None] | None  # is told how many bytes are done, of how many in all
Slices: TypeAlias = Iterator[tuple[torch.Tensor, torch.Tensor]]  # (rows of the local tensor, what is stored there)


def stored_slices(
    work: Sequence[Stored], progress: Progress = None
) -> Iterator[tuple[LocalShard, TensorEntry, Slices]]:
    """Yield every shard of ``work`` with its slices, which are to be read before the next one is asked for. Local.

    Raises:
        ValueError: a file is no safetensors file.
    """
    num_done, num_total = 0, sum(shard.local.nbytes for shard, _, _ in work)
    by_file: dict[Path, list[tuple[LocalShard, TensorEntry]]] = {}
    for shard, file, entry in work:
        by_file.setdefault(file.path, []).append((shard, entry))
    for path, of_file in by_file.items():
        with open_weights(path) as handle:
            for shard, entry in sorted(of_file, key=lambda pair: pair[1].start):
                yield shard, entry, _parts(shard, entry, handle)
                num_done += shard.local.nbytes
                if progress is not None:
                    progress(num_done, num_total)


def fill_shards(work: Sequence[Stored], progress: Progress = None) -> None:
    """Read every shard of ``work`` in place. Local; raises as :func:`stored_slices`."""
    send_in_turn(pair for _, _, slices in stored_slices(work, progress) for pair in slices)


def read_ahead(path: Path, ranges: Sequence[tuple[int, int]]) -> None:
    """Have the system read bytes of a file before they are asked for, where it knows how. Local, waits for no byte."""
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    with suppress(OSError), path.open("rb") as file:  # whoever reads them will say what is wrong
        for start, stop in ranges:
            for first in range(start, stop, _AHEAD_BYTES):
                os.posix_fadvise(file.fileno(), first, min(_AHEAD_BYTES, stop - first), os.POSIX_FADV_WILLNEED)


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
