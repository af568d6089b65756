"""Which of a rank's elements are in whole groups or rows, and which in some that a shard edge cuts. No communication.

Nouns: a *unit* is decided by itself: the m inputs of an N:M group, or a row. A unit is *cut* on a rank that holds
some of it and not all. Elements are numbered along the rows of the matrix, one row after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from distprune.shards.device import chunk_size, sent
from distprune.shards.geometry import Geometry
from distprune.shards.matrix import LocalMatrix, Matrix

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LocalUnits:
    """This rank's elements of one parameter, in units of ``length`` inputs of one row.

    Those of ``whole`` units are all rows of ``local`` by some of its columns, from local offset ``begin``. The others
    are by some other columns, ``cut``, or they are ``scattered``: their numbers, ascending, and local offsets.
    """

    matrix: Matrix
    local: LocalMatrix
    whole: IntArray
    cut: IntArray
    begin: int = 0
    scattered: tuple[IntArray, IntArray] | None = None

    @staticmethod
    def of(geometry: Geometry, matrix: Matrix, length: int) -> LocalUnits:
        """Return the units of ``length`` inputs that ``geometry`` holds. Local."""
        local = LocalMatrix.of(geometry, matrix)
        if local is not None:
            _, unit, size = np.unique(local.columns // length, return_inverse=True, return_counts=True)
            is_whole = size[unit] == length
            return LocalUnits(matrix, local, np.flatnonzero(is_whole), np.flatnonzero(~is_whole))
        # A stretch of the flattened parameter: whole units in the middle, cut ones at its ends.
        numel, start = geometry.local_numel, None if matrix.transposed else geometry.flat_start
        first = numel if start is None else min(-start % length, numel)
        num = (numel - first) // length
        offsets = np.concatenate([np.arange(first), np.arange(first + num * length, numel)])
        rows, columns = matrix.place(geometry.flat_indices_at(torch.from_numpy(offsets)).numpy())
        numbers = rows * matrix.num_in + columns
        order = np.argsort(numbers, kind="stable")
        whole, none = np.arange(length if num else 0), np.empty(0, dtype=np.int64)
        middle = LocalMatrix(np.arange(num), whole, None)
        return LocalUnits(matrix, middle, whole, none, first, (numbers[order], offsets[order]))

    @property
    def num_cut(self) -> int:
        """Elements in cut units."""
        return len(self.local.rows) * len(self.cut) if self.scattered is None else len(self.scattered[0])

    @property
    def rows(self) -> tuple[int, int]:
        """The first and the last row of cut units."""
        first, last = (
            self.local.rows[[0, -1]] if self.scattered is None else self.scattered[0][[0, -1]] // self.matrix.num_in
        )
        return int(first), int(last)

    def cut_between(self, low: int, high: int, device: torch.device) -> tuple[IntArray, slice | torch.Tensor]:
        """Return the elements in cut units of rows ``low`` to ``high``: numbers from that row on, and local offsets."""
        num_in = self.matrix.num_in
        if self.scattered is not None:
            at = slice(*np.searchsorted(self.scattered[0], [low * num_in, high * num_in]).tolist())
            return self.scattered[0][at] - low * num_in, sent(torch.from_numpy(self.scattered[1][at]), device)
        first, last = np.searchsorted(self.local.rows, [low, high]).tolist()
        numbers = ((self.local.rows[first:last, None] - low) * num_in + self.local.columns[self.cut]).reshape(-1)
        if self.local.num_local_out is None and not len(self.whole):
            return numbers, slice(first * len(self.cut), last * len(self.cut))
        offsets = self.local.offsets(np.arange(first, last), self.cut).reshape(-1)
        return numbers, sent(torch.from_numpy(offsets), device)

    @property
    def is_dense(self) -> bool:
        """Whether all elements are in whole units, which follow each other in memory."""
        return self.local.num_local_out is None and self.num_cut == 0 and len(self.whole) == len(self.local.columns)

    def chunks(self, device: torch.device) -> Iterator[slice | torch.Tensor]:
        """Yield the local offsets of whole units, some rows at a time."""
        num, width = len(self.local.rows), len(self.whole)
        step = max(1, chunk_size(device) // max(width, 1))
        is_dense = self.local.num_local_out is None and width == len(self.local.columns)
        columns = None if is_dense else sent(torch.from_numpy(self.whole), device)
        for first in range(0, num if width else 0, step):
            last = min(first + step, num)
            if columns is None:
                yield slice(self.begin + first * width, self.begin + last * width)
            else:
                yield self.local.offsets(torch.arange(first, last, device=device), columns).view(-1)
