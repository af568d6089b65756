"""Which of a rank's elements are in whole groups or rows, and which in some that a shard edge cuts. No communication.

Nouns: a *unit* is decided by itself: the m inputs of an N:M group, or a row. A unit is *cut* on a rank that holds
some of it and not all. Elements are numbered along the rows of the matrix, one row after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from distprune.patterns.boxes import local_matrices
from distprune.shards.device import chunk_size, sent
from distprune.shards.geometry import Geometry
from distprune.shards.matrix import Matrix

IntArray = npt.NDArray[np.int64]


class LocalUnits:
    """This rank's elements of one parameter, in units of ``length`` inputs of one row.

    ``num_cut``: how many elements are in cut units. ``is_dense``: none is, and units follow each other in memory.
    """

    def __init__(self, geometry: Geometry, matrix: Matrix, length: int) -> None:
        self._num_in, self._parts = matrix.num_in, []
        for begin, local in local_matrices(geometry, matrix):
            _, unit, size = np.unique(local.columns // length, return_inverse=True, return_counts=True)
            is_whole = size[unit] == length
            self._parts.append((begin, local, np.flatnonzero(is_whole), np.flatnonzero(~is_whole)))
        self.num_cut = sum(len(local.rows) * len(cut) for _, local, _, cut in self._parts)
        self.is_dense = not self.num_cut and all(local.num_local_out is None for _, local, *_ in self._parts)

    def cut(self, device: torch.device) -> tuple[IntArray, slice | torch.Tensor]:
        """Return the elements in cut units: numbers, ascending, and local offsets."""
        parts = [np.empty((2, 0), dtype=np.int64)]
        for begin, local, _, cut in self._parts:
            rows = np.arange(len(local.rows))
            numbers = local.rows[:, None] * self._num_in + local.columns[cut]
            parts.append(np.stack([numbers.reshape(-1), begin + local.offsets(rows, cut).reshape(-1)]))
        numbers, offsets = np.concatenate(parts, 1)
        order = np.argsort(numbers, kind="stable")
        numbers, offsets = numbers[order], offsets[order]
        if len(offsets) and (np.diff(offsets) == 1).all():
            return numbers, slice(int(offsets[0]), int(offsets[-1]) + 1)
        return numbers, sent(torch.from_numpy(offsets), device)

    def whole(self, device: torch.device) -> Iterator[tuple[slice | torch.Tensor, int]]:
        """Yield the local offsets of whole units, some rows at a time, and how many these are."""
        for begin, local, whole, _ in self._parts:
            num, width = len(local.rows), len(whole)
            is_dense = local.num_local_out is None and width == len(local.columns)
            columns = sent(torch.from_numpy(whole), device)
            step = max(1, chunk_size(device) // max(width, 1))
            for first in range(0, num if width else 0, step):
                last = min(first + step, num)
                at: slice | torch.Tensor = slice(begin + first * width, begin + last * width)
                if not is_dense:
                    at = begin + local.offsets(torch.arange(first, last, device=device), columns).view(-1)
                yield at, (last - first) * width
