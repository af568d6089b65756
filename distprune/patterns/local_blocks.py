"""The blocks of which a rank's elements are parts. No communication.

Nouns: a parameter is kept as *lines* of one length, which are the rows of its matrix, or, transposed, the columns. A
*band* is the lines, or the elements within a line, that share blocks; a block is *whole* if its bands are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from distprune.patterns.addends import wrapped
from distprune.shards.device import chunk_size, on_host, sent
from distprune.shards.geometry import Geometry, runs_of
from distprune.shards.matrix import LocalMatrix, Matrix

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Bands:
    """Bands of ``size`` indices, of which some are here, ascending. ``numbers``: of bands; ``starts``: and the end."""

    def __init__(self, indices: IntArray, size: int) -> None:
        self.numbers, first, band, num = np.unique(
            indices // size, return_index=True, return_inverse=True, return_counts=True
        )
        self.starts: list[int] = [*first.tolist(), len(indices)]
        self.are_full: BoolArray = num == size
        self.places: IntArray = band * size + indices % size  # if all bands here were full


@dataclass(frozen=True, eq=False)
class LocalBlocks:
    """Blocks of ``size`` x ``size``, (line bands, column bands), of ``numel`` local elements from ``begin`` on.

    They fill lines from left to right; ``skip`` elements of the first one, and some of the last, may be elsewhere.
    """

    matrix: Matrix
    size: int
    lines: Bands
    columns: Bands
    begin: int
    numel: int
    skip: int = 0

    @staticmethod
    def of(geometry: Geometry, matrix: Matrix, size: int) -> list[LocalBlocks]:
        """Return the blocks of what ``geometry`` holds: of each range, if it is of the flattened parameter."""
        local = LocalMatrix.of(geometry, matrix) if geometry.local_numel else None
        if local is not None:
            lines, columns = local.rows, local.columns
            if (num := local.num_local_out) is not None:
                lines = (local.rows[::num, None] // matrix.num_out * matrix.num_in + columns).reshape(-1)
                columns = local.rows[:num] % matrix.num_out
            return [LocalBlocks(matrix, size, Bands(lines, size), Bands(columns, size), 0, geometry.local_numel)]
        found, begin, width = [], 0, matrix.num_out if matrix.transposed else matrix.num_in
        for start, stop in geometry.dim_runs[0] if geometry.local_numel else ():
            bands = Bands(np.arange(start // width, -(-stop // width)), size), Bands(np.arange(width), size)
            found.append(LocalBlocks(matrix, size, *bands, begin, stop - start, start % width))
            begin += stop - start
        return found

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.lines.numbers), len(self.columns.numbers)

    @property
    def width(self) -> int:
        return self.columns.starts[-1]

    @cached_property
    def whole(self) -> tuple[IntArray, IntArray]:
        """The line bands, and the column bands, of whole blocks."""
        lines = self.lines.are_full.copy()
        lines[0] &= not self.skip
        lines[-1] &= self.skip + self.numel == self.lines.starts[-1] * self.width
        return np.flatnonzero(lines), np.flatnonzero(self.columns.are_full)

    @cached_property
    def cut(self) -> IntArray:
        """The places of cut blocks among all blocks here."""
        is_cut = np.ones(self.shape, dtype=np.bool_)
        is_cut[np.ix_(*self.whole)] = False
        return np.flatnonzero(is_cut)

    @property
    def num_cut(self) -> int:
        lines, columns = self.whole
        return self.shape[0] * self.shape[1] - len(lines) * len(columns)

    def numbers(self, places: IntArray) -> IntArray:
        """Return the numbers in the parameter, row-major in its matrices, of the blocks at some places here."""
        across, (lines, columns) = self.matrix.num_in // self.size, np.divmod(places, self.shape[1])
        line, column = self.lines.numbers[lines], self.columns.numbers[columns]
        if not self.matrix.transposed:
            return line * across + column
        return (line // across * (self.matrix.num_out // self.size) + column) * across + line % across

    @cached_property
    def whole_places(self) -> tuple[Geometry, IntArray | slice]:
        """Which of the parameter's blocks the whole ones are, and their places here, in that order."""
        lines, columns = self.whole
        across, num = self.matrix.num_in // self.size, self.matrix.num_rows // self.size
        if not self.matrix.transposed:
            runs = runs_of(self.lines.numbers[lines]), runs_of(self.columns.numbers[columns])
            places = (lines[:, None] * self.shape[1] + columns).reshape(-1) if self.num_cut else slice(None)
            return Geometry((num, across), runs), places
        places = (lines[:, None] * self.shape[1] + columns).reshape(-1)
        numbers = self.numbers(places)
        order = np.argsort(numbers)
        return Geometry((num * across,), (runs_of(numbers[order]),)), places[order]

    def chunks(self, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Yield local offsets, and the line bands that they are of."""
        num, starts = len(self.lines.numbers), self.lines.starts
        most = chunk_size(device) // (1 if on_host(device) else 2)  # sums take more words
        step = max(1, most // (self.size * self.width))
        for first in range(0, num, step):
            last = min(first + step, num)
            low, high = (min(max(starts[i] * self.width - self.skip, 0), self.numel) for i in (first, last))
            yield slice(self.begin + low, self.begin + high), slice(first, last)

    def added_up(self, bands: slice, values: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the sums by block of ``values`` of the elements of line ``bands``, each less ``offset``; they wrap."""
        num, lines = bands.stop - bands.start, slice(self.lines.starts[bands.start], self.lines.starts[bands.stop])
        grid, size = (num, self.size, self.shape[1], self.size), self.size**2
        if not self._is_even(bands, len(values)):
            values, size = (values - offset if offset else values), 0
            num_before = 0 if bands.start else self.skip
            padded = values.new_zeros((lines.stop - lines.start) * self.width)
            padded[num_before : num_before + len(values)] = values
            values = values.new_zeros((num * self.size, self.shape[1] * self.size))
            values[self._places(bands, values.device)] = padded.view(-1, self.width)
        sums = values.view(grid).sum(1).sum(2)  # lines first: by far the faster way
        return sums.to(torch.int64) - wrapped(offset * size)

    def spread(self, bands: slice, of_blocks: torch.Tensor, out: torch.Tensor) -> None:
        """Write what there is ``of_blocks``, bool, of all bands, into ``out``, of the elements of line ``bands``."""
        grid = bands.stop - bands.start, self.size, self.shape[1], self.size
        spread = of_blocks[bands, None, :, None].expand(grid)
        if self._is_even(bands, len(out)):
            out.view(grid).copy_(spread)
            return
        num_before = 0 if bands.start else self.skip
        lines = spread.reshape(grid[0] * self.size, -1)[self._places(bands, out.device)].view(-1)
        out.copy_(lines[num_before : num_before + len(out)])

    def _is_even(self, bands: slice, num: int) -> bool:
        """Return whether the ``num`` elements of line ``bands`` fill all blocks of these."""
        return bool(num == (bands.stop - bands.start) * self.size**2 * self.shape[1])

    def _places(self, bands: slice, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where lines and columns of line ``bands`` are among all of their blocks."""
        lines = self.lines.places[self.lines.starts[bands.start] : self.lines.starts[bands.stop]]
        rows = sent(torch.from_numpy(lines - bands.start * self.size), device)
        return rows[:, None], sent(torch.from_numpy(self.columns.places), device)
