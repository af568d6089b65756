"""Which of a rank's elements are in whole groups or rows, and which in some that a shard edge cuts. No communication.

Nouns: a *unit* is decided by itself: the m inputs of an N:M group, or a row. A unit is *cut* on a rank that holds
some of it and not all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from distprune.shards.device import sent
from distprune.shards.geometry import Geometry
from distprune.shards.matrix import LocalMatrix, Matrix

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rectangle:
    """Local elements: all combinations of some rows and columns, which ascend.

    That of row i and column j is at local offset ``row_offsets[i] + column_offsets[j]``.
    """

    rows: IntArray
    columns: IntArray
    row_offsets: IntArray
    column_offsets: IntArray

    @property
    def numel(self) -> int:
        return len(self.rows) * len(self.columns)

    @cached_property
    def _is_contiguous(self) -> bool:
        across = self.column_offsets[-1] - self.column_offsets[0] + 1
        down = self.row_offsets[-1] - self.row_offsets[0]
        return bool(across == len(self.columns) and down + across == self.numel)

    def offsets(self, first: int, last: int, device: torch.device) -> slice | torch.Tensor:
        """Return the local offsets of the elements of its rows ``first`` to ``last``, row by row."""
        if self._is_contiguous:
            begin = int(self.row_offsets[first] + self.column_offsets[0])
            return slice(begin, begin + (last - first) * len(self.columns))
        rows = sent(torch.from_numpy(self.row_offsets[first:last]), device)
        return (rows[:, None] + sent(torch.from_numpy(self.column_offsets), device)).view(-1)


@dataclass(frozen=True)
class LocalUnits:
    """This rank's elements of one parameter: those in whole units, and those in cut units.

    ``matrix`` holds the local elements from offset ``begin``; ``whole`` are the local columns of its whole units.
    """

    begin: int
    matrix: LocalMatrix
    whole: IntArray
    cut: tuple[Rectangle, ...]

    @property
    def num_cut(self) -> int:
        """Elements in cut units."""
        return sum(rectangle.numel for rectangle in self.cut)

    @property
    def is_dense(self) -> bool:
        """Whether the matrix is contiguous local elements, row by row, without cut units."""
        return self.matrix.num_local_out is None and len(self.whole) == len(self.matrix.columns)


def find_units(geometry: Geometry, matrix: Matrix, length: int) -> LocalUnits:
    """Return which local elements are in whole and in cut units of ``length`` inputs of one row. Local."""
    none = np.empty(0, dtype=np.int64)
    numel = geometry.local_numel
    if numel == 0:
        return LocalUnits(0, LocalMatrix(none, none, None), none, ())
    local = LocalMatrix.of(geometry, matrix)
    if local is None:  # a stretch of the flattened parameter: whole units in the middle, cut ones at its ends
        first = -geometry.flat_start % length if geometry.flat_start is not None and not matrix.transposed else numel
        num_units = max(0, numel - first) // length
        first, end = (first, first + num_units * length) if num_units else (0, 0)
        columns = np.arange(length if num_units else 0)
        cut = (*_rectangles(geometry, matrix, 0, first), *_rectangles(geometry, matrix, end, numel))
        return LocalUnits(first, LocalMatrix(np.arange(num_units), columns, None), columns, cut)
    if len(local.columns) == matrix.num_in:  # whole rows
        return LocalUnits(0, local, np.arange(matrix.num_in), ())
    _, unit, size = np.unique(local.columns // length, return_inverse=True, return_counts=True)
    is_whole = size[unit] == length
    parted, origin = np.flatnonzero(~is_whole), np.zeros(1, dtype=np.int64)
    rectangle = Rectangle(
        local.rows,
        local.columns[parted],
        local.offsets(np.arange(len(local.rows)), origin)[:, 0],
        local.offsets(origin, parted)[0],
    )
    return LocalUnits(0, local, np.flatnonzero(is_whole), (rectangle,) if rectangle.numel else ())


def _rectangles(geometry: Geometry, matrix: Matrix, begin: int, end: int) -> Iterator[Rectangle]:
    """Yield the local elements ``begin`` to ``end`` of a part of the flattened parameter."""
    width = matrix.num_out if matrix.transposed else matrix.num_in  # of a line of the matrix as it is kept
    whole = width * matrix.num_in if matrix.transposed else geometry.global_numel  # of which the columns are one range
    passed = 0
    for start, stop in geometry.dim_runs[0]:
        shift = passed - start  # from flat to local
        passed += stop - start
        first, last = max(start, begin - shift), min(stop, end - shift)
        inner = {-(-first // width) * width, last // width * width, *range(-(-first // whole) * whole, last, whole)}
        edges = sorted({first, last, *(edge for edge in inner if first < edge < last)}) if first < last else []
        for low, high in itertools.pairwise(edges):
            num_lines = max(1, (high - low) // width)
            lines, within = np.arange(num_lines), np.arange((high - low) // num_lines)
            of_lines, of_within = low + shift + lines * width, within
            lines, within = lines + low // width, within + low % width
            if matrix.transposed:
                rows = lines[0] // matrix.num_in * matrix.num_out + within
                yield Rectangle(rows, lines % matrix.num_in, of_within, of_lines)
            else:
                yield Rectangle(lines, within, of_lines, of_within)
