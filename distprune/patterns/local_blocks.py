"""The blocks of which a rank's elements are parts. No communication.

Nouns: elements are kept as *lines* of one length, which are the rows of a matrix, or, transposed, the columns. A
*band* is the lines, or the elements within a line, that share blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from distprune.patterns.addends import wrapped
from distprune.patterns.boxes import local_matrices
from distprune.shards.device import chunk_size, on_host, sent
from distprune.shards.geometry import Geometry
from distprune.shards.matrix import LocalMatrix, Matrix

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Local elements ``at``: all combinations of some lines and columns, of which each is in a band, from 0 up.

    ``places``: (line bands, column bands), of the blocks among those of :class:`LocalBlocks`.
    """

    at: slice
    places: IntArray
    lines: IntArray
    columns: IntArray
    size: int

    @property
    def _grid(self) -> tuple[int, int, int, int] | None:
        """The shape of the elements, if they fill all blocks."""
        bands, across = self.places.shape
        is_full = len(self.lines) == bands * self.size and len(self.columns) == across * self.size
        return (bands, self.size, across, self.size) if is_full else None

    def where(self, device: torch.device) -> slice | torch.Tensor:
        """Return the places, row-major: of what follows each other a slice."""
        places = self.places.reshape(-1)
        if (np.diff(places) == 1).all():
            return slice(int(places[0]), int(places[-1]) + 1)
        return sent(torch.from_numpy(places), device)

    def added_up(self, values: torch.Tensor, offset: int | None) -> torch.Tensor:
        """Return the sums by block of ``values`` of the elements, each less ``offset``; they wrap."""
        offset, device = offset or 0, values.device
        if self._grid is not None:
            sums = values.view(self._grid).sum(1).sum(2)  # lines first: by far the faster way
            return sums.view(-1).to(torch.int64) - wrapped(offset * self.size**2)
        lines, columns = (sent(torch.from_numpy(bands), device) for bands in (self.lines, self.columns))
        rows = (values.to(torch.int64) - offset).view(len(lines), len(columns))
        num, across = self.places.shape
        sums = torch.zeros((num, len(columns)), dtype=torch.int64, device=device).index_add_(0, lines, rows)
        total = torch.zeros((num, across), dtype=torch.int64, device=device)
        return total.index_add_(1, columns, sums).view(-1)

    def spread(self, stays: torch.Tensor, out: torch.Tensor) -> None:
        """Write what ``stays`` of all blocks, bool, into ``out``, of the elements."""
        of_blocks = stays[self.where(out.device)].view(self.places.shape)
        if self._grid is not None:
            out.view(self._grid).copy_(of_blocks[:, None, :, None].expand(self._grid))
        else:
            lines, columns = (sent(torch.from_numpy(bands), out.device) for bands in (self.lines, self.columns))
            out.view(len(lines), len(columns)).copy_(of_blocks[lines].index_select(1, columns))


class LocalBlocks:
    """Blocks of ``size`` x ``size``, of which ``geometry`` holds some elements.

    ``numbers``, ascending: row-major in the parameter's matrices. ``are_cut``: those that are not all here.
    """

    def __init__(self, geometry: Geometry, matrix: Matrix, size: int) -> None:
        self._size, self._parts = size, list[tuple[int, IntArray, IntArray]]()
        numbers, nums = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for begin, local in local_matrices(geometry, matrix):
            (line_bands, lines), (column_bands, columns) = (
                np.unique(indices // size, return_inverse=True) for indices in _lines_and_columns(local, matrix)
            )
            self._parts.append((begin, lines, columns))
            numbers.append(_numbers(line_bands, column_bands, matrix, size).reshape(-1))
            nums.append(np.outer(np.bincount(lines), np.bincount(columns)).reshape(-1))
        self.numbers, self._places, filled = np.concatenate(numbers), None, np.concatenate(nums)
        if not (np.diff(self.numbers) > 0).all():
            self.numbers, self._places = np.unique(self.numbers, return_inverse=True)
            filled = np.bincount(self._places, filled, len(self.numbers))
        self.are_cut = filled < size**2

    def rectangles(self, device: torch.device) -> Iterator[Rectangle]:
        """Yield all elements, some line bands at a time."""
        passed = 0
        for begin, lines, columns in self._parts:
            num, across = (int(bands[-1]) + 1 if len(bands) else 0 for bands in (lines, columns))
            starts, most = np.searchsorted(lines, np.arange(num + 1)), chunk_size(device)
            step = max(1, most // (1 if on_host(device) else 2) // max(self._size * len(columns), 1))  # sums take more
            for first in range(0, num if across else 0, step):
                last = min(first + step, num)
                low, high = starts[[first, last]].tolist()
                places = np.arange(passed + first * across, passed + last * across).reshape(-1, across)
                places = places if self._places is None else self._places[places]
                at = slice(begin + low * len(columns), begin + high * len(columns))
                yield Rectangle(at, places, lines[low:high] - first, columns, self._size)
            passed += num * across


def _lines_and_columns(local: LocalMatrix, matrix: Matrix) -> tuple[IntArray, IntArray]:
    """Return the lines of all matrices, and the columns, that are here, in local order."""
    if (num := local.num_local_out) is None:
        return local.rows, local.columns
    if not num:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    lines = local.rows[::num, None] // matrix.num_out * matrix.num_in + local.columns
    return lines.reshape(-1), local.rows[:num] % matrix.num_out


def _numbers(line_bands: IntArray, column_bands: IntArray, matrix: Matrix, size: int) -> IntArray:
    """Return the numbers of blocks, (line bands, column bands)."""
    across, line, column = matrix.num_in // size, line_bands[:, None], column_bands
    if not matrix.transposed:
        return line * across + column
    return (line // across * (matrix.num_out // size) + column) * across + line % across
