"""The slices of stored tensors that a rank holds, read file by file in the order of their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch

from distprune.checkpoint.extras import import_extra
from distprune.checkpoint.hf_directory import TensorEntry, WeightFile
from distprune.shards import LocalShard, Runs

__all__ = ["Stored", "open_weights", "stored_slices"]

_COPY_BYTES = 8 << 20  # read at a time; what is mapped from the file is not counted as ours

Stored: TypeAlias = tuple[LocalShard, WeightFile, TensorEntry]  # a shard, and where its tensor is stored
Slices: TypeAlias = Iterator[tuple[torch.Tensor, torch.Tensor]]  # (rows of the local tensor, what is stored there)


def stored_slices(work: Sequence[Stored]) -> Iterator[tuple[LocalShard, TensorEntry, Slices]]:
    """Yield every shard of ``work`` with its slices, which are to be read before the next one is asked for. Local.

    Raises:
        ValueError: a file is no safetensors file.
    """
    for path in dict.fromkeys(file.path for _, file, _ in work):
        of_file = sorted(((s, e) for s, f, e in work if f.path == path), key=lambda pair: pair[1].start)
        with open_weights(path) as handle:
            for shard, entry in of_file:
                yield shard, entry, _parts(shard, entry, handle.get_slice(entry.name))


@contextmanager
def open_weights(path: Path) -> Iterator[Any]:
    """Yield the open safetensors file ``path``. Local.

    Raises:
        ValueError: the safetensors library cannot read it.
    """
    safetensors = import_extra("safetensors", "hf")
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as handle:
            yield handle
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def _parts(shard: LocalShard, entry: TensorEntry, stored: Any) -> Slices:
    """Yield (rows of the local tensor, what is stored there), a bounded number of rows at a time."""
    if shard.local.numel() == 0:
        return
    if not entry.shape:
        yield shard.local, stored[...]
        return
    row_bytes = max(1, shard.local[0].numel() * entry.dtype.itemsize)
    step = max(1, _COPY_BYTES // row_bytes)
    local_start = 0
    for run_start, run_stop in shard.geometry.dim_runs[0]:
        for start in range(run_start, run_stop, step):
            stop = min(start + step, run_stop)
            rows = shard.local[local_start : local_start + stop - start]
            yield rows, _stored_rows(stored, (start, stop), shard.geometry.dim_runs[1:])
            local_start += stop - start


def _stored_rows(stored: Any, rows: tuple[int, int], runs: tuple[Runs, ...]) -> torch.Tensor:
    # Slices where a dim is one run; dims of several runs (strided shards of dim 1) are picked out of one.
    part: torch.Tensor = stored[(slice(*rows), *(slice(dim[0][0], dim[-1][1]) for dim in runs))]
    for dim, dim_runs in enumerate(runs, start=1):
        if len(dim_runs) > 1:
            first = dim_runs[0][0]
            part = torch.cat([part.narrow(dim, low - first, high - low) for low, high in dim_runs], dim=dim)
    return part
