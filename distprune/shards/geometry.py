"""Where the elements of a local shard sit in the whole parameter: plain ints, no ranks.

Nouns: a *run* is a half-open range of global indices along one dim. A *dim index* is the runs that a
rank holds along that dim, in local order. The local elements are all combinations of the dim indices. The
*flat index* of an element is its row-major position in the unsharded parameter. Every layout is
reduced to these first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distprune.formatting import one_line
from distprune.shards.device import sent

Runs = tuple[tuple[int, int], ...]
IntArray = npt.NDArray[np.int64]

_ROOT = 92_821_450_643_191  # any number; this one was drawn


@dataclass(frozen=True)
class Split:
    """Mesh axis ``axis`` cutting one tensor dim: this rank takes chunk ``index`` of ``num_chunks``.

    ``stride > 1`` is torch's ``_StridedShard(split_factor=stride)``: the dim is cut in ``stride``
    parts first, and every part in ``num_chunks``.
    """

    num_chunks: int
    index: int
    stride: int = 1
    axis: int = 0


def runs_of_splits(size: int, splits: Sequence[Split]) -> Runs:
    """Return the runs left of ``range(size)`` after ``splits``, which are given by mesh axis.

    Chunks are those of ``torch.chunk``: all of ceil(size / num_chunks), the last ones shorter or empty.
    """
    runs: Runs = ((0, size),) if size else ()
    for split in in_order(splits):
        parts = [chunk_runs(runs, split.stride, part) for part in range(split.stride)]
        runs = tuple(run for part in parts for run in chunk_runs(part, split.num_chunks, split.index))
    return runs


def in_order(splits: Sequence[Split]) -> list[Split]:
    """Return ``splits``, given by mesh axis, in the order in which they are applied.

    That is from the first axis to the last. But a strided split whose stride is the product of the later ones is
    applied after those (FSDP2 on top of tensor parallel), without a stride, which also holds for uneven sizes.
    """
    ordered: list[Split] = []
    for split in reversed(splits):
        if split.stride > 1 and split.stride == math.prod(later.num_chunks for later in ordered):
            ordered.append(dataclasses.replace(split, stride=1))
        else:
            ordered.insert(0, split)
    return ordered


def indices_of(runs: Runs) -> torch.Tensor:
    """Return the indices that ``runs`` cover, in their order, (num,) int64, on the CPU."""
    return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in ((0, 0), *runs)])


def runs_of(indices: IntArray) -> Runs:
    """Return ascending ``indices`` as runs."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks)) if len(indices) else ()


def chunk_runs(runs: Runs, num_chunks: int, index: int) -> Runs:
    """Return chunk ``index`` of ``num_chunks`` of what ``runs`` cover, as ``torch.chunk`` cuts it."""
    size = sum(stop - start for start, stop in runs)
    chunk_size = -(-size // num_chunks)
    begin, end = min(index * chunk_size, size), min((index + 1) * chunk_size, size)
    kept: list[tuple[int, int]] = []
    passed = 0
    for start, stop in runs:
        low, high = max(begin - passed, 0), min(end - passed, stop - start)
        if low < high:
            kept.append((start + low, start + high))
        passed += stop - start
    return tuple(kept)


@dataclass(frozen=True)
class Geometry:
    """The local part of a parameter of ``global_shape``: one dim index for every dim.

    >>> Geometry.rows((8, 3), 2, 4)  # of a rank that holds rows 2 and 3
    <Geometry: (2, 3) of (8, 3)>
    """

    PRIME: ClassVar[int] = 2**47 - 115  # of fingerprints

    global_shape: tuple[int, ...]
    dim_runs: tuple[Runs, ...]

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{self.local_shape} of {self.global_shape}")

    @staticmethod
    def rows(global_shape: Sequence[int], start: int, stop: int) -> Geometry:
        """Return the geometry of a rank that holds rows ``start`` to ``stop``: indices along dim 0, all of the others.

        Raises:
            ValueError: a scalar, or not 0 <= ``start`` <= ``stop`` <= the number of rows.
        """
        shape = tuple(global_shape)
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"rows {start} to {stop} are not a range of the rows of shape {shape}")
        return Geometry(shape, (((start, stop),) if start < stop else (), *Geometry.whole(shape).dim_runs[1:]))

    @staticmethod
    def whole(global_shape: Sequence[int]) -> Geometry:
        """Return the geometry of a rank that holds everything."""
        return _whole(tuple(global_shape))

    @staticmethod
    def nothing(global_shape: Sequence[int]) -> Geometry:
        """Return the geometry of a rank that holds no element."""
        return Geometry(tuple(global_shape), ((),) * max(len(global_shape), 1))

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in runs) for runs in self.dim_runs)

    @cached_property
    def local_numel(self) -> int:
        return math.prod(self.local_shape)

    @cached_property
    def global_numel(self) -> int:
        return math.prod(self.global_shape)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        """Row-major strides of the whole parameter, in elements."""
        return tuple(math.prod(self.global_shape[dim + 1 :]) for dim in range(len(self.global_shape)))

    @cached_property
    def flat_start(self) -> int | None:
        """The flat index of the first local element if the local elements are contiguous, else ``None``."""
        start = 0
        for dim, runs in enumerate(self.dim_runs[: len(self.global_shape)]):
            if len(runs) != 1:
                return None
            # Contiguous: one index along the leading dims, then one run, then whole dims.
            if self.local_shape[dim] != self.global_shape[dim] and math.prod(self.local_shape[:dim]) != 1:
                return None
            start += runs[0][0] * self._strides[dim]
        return start

    def stretches(self) -> tuple[IntArray, IntArray]:
        """Return local elements that follow each other in the whole: flat indices of the first ones, and their offsets.

        There is one offset more, where the last of these stretches ends.
        """
        starts, lengths, stride = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), 1
        if not self.local_numel:
            return starts[:0], starts
        for runs, size in zip(reversed(self.dim_runs), reversed(self.global_shape), strict=True):
            if lengths[0] == stride:  # all of the inner dims
                starts, ends = np.array(runs).T * stride
                lengths = ends - starts
            else:
                indices = indices_of(runs).numpy()
                starts = (indices[:, None] * stride + starts).reshape(-1)
                lengths = np.tile(lengths, len(indices))
            stride *= size
        return starts, np.append(0, np.cumsum(lengths))

    def fingerprint(self) -> int:
        """Return the sum of r**i over the flat indices i held, modulo a prime below 2**47.

        The sum over ranks is that of the whole parameter if every element is held once, and else, but for one chance
        in thousands, it is not. 65,536 fingerprints fit into an int64 sum.
        """
        total = int(self.local_numel > 0)
        for dim, runs in enumerate(self.dim_runs if total else ()):
            base = pow(_ROOT, self._strides[dim] if self.global_shape else 1, Geometry.PRIME)
            held = sum(pow(base, stop, Geometry.PRIME) - pow(base, start, Geometry.PRIME) for start, stop in runs)
            total = total * held * pow(base - 1, -1, Geometry.PRIME) % Geometry.PRIME
        return total

    def flat_indices(
        self, start: int, stop: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.int64
    ) -> torch.Tensor:
        """Return the flat indices of the local elements ``start`` to ``stop`` (row-major local order): new."""
        if self.flat_start is not None or stop <= start:
            first = (self.flat_start or 0) + start
            return torch.arange(first, first + max(stop - start, 0), dtype=dtype, device=device)
        row_size = self.local_shape[-1]
        first_row, end_row = start // row_size, -(-stop // row_size)
        rows = self._row_starts(torch.arange(first_row, end_row, device=device))
        columns = _global_index(self.dim_runs[-1], torch.arange(row_size, device=device))
        flat = (rows[:, None] + columns).view(-1)[start - first_row * row_size : stop - first_row * row_size]
        return flat.to(dtype)

    def flat_indices_at(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return the flat indices of the local elements at ``offsets`` (int64, any order), on their device."""
        if self.local_numel == 0:
            return offsets
        if self.flat_start is not None:
            return offsets + self.flat_start
        row_size = self.local_shape[-1]
        return self._row_starts(offsets // row_size) + _global_index(self.dim_runs[-1], offsets % row_size)

    def _row_starts(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the flat index at which each local row (all dims but the last, flattened) begins."""
        starts = torch.zeros_like(rows)
        for dim in range(len(self.global_shape) - 2, -1, -1):
            size = self.local_shape[dim]
            starts += _global_index(self.dim_runs[dim], rows % size) * self._strides[dim]
            rows = rows // size
        return starts

    def num_before(self, flat: int) -> int:
        """Return how many local elements have a flat index below ``flat``. Runs must ascend."""
        if not 0 < flat < self.global_numel:
            return self.local_numel if flat > 0 else 0
        num = 0
        for dim, runs in enumerate(self.dim_runs):
            index = flat // self._strides[dim] % self.global_shape[dim]
            below = sum(min(max(index - start, 0), stop - start) for start, stop in runs)
            num += below * math.prod(self.local_shape[dim + 1 :])
            if not any(start <= index < stop for start, stop in runs):
                break
        return num


@lru_cache(maxsize=1 << 12)
def _whole(shape: tuple[int, ...]) -> Geometry:
    """Return the geometry that all whole parameters of a shape share."""
    return Geometry(shape, tuple(((0, size),) if size else () for size in shape))


def _global_index(runs: Runs, local: torch.Tensor) -> torch.Tensor:
    """Return the global index along a dim of every local one."""
    if len(runs) == 1:
        return local + runs[0][0]
    firsts, shifts = _table(runs, local.device)
    return local + shifts[torch.searchsorted(firsts, local, right=True) - 1]


@lru_cache(maxsize=256)
def _table(runs: Runs, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first local index of each of ``runs`` and how far it is from its global one; made once a device."""
    firsts = list(itertools.accumulate((high - low for low, high in runs), initial=0))[:-1]
    shifts = [low - first for (low, _), first in zip(runs, firsts, strict=True)]
    on_cpu = [torch.tensor(values, dtype=torch.int64, device="cpu") for values in (firsts, shifts)]
    return sent(on_cpu[0], device), sent(on_cpu[1], device)
