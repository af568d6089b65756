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
from distprune.shards.geometry import Geometry, Runs, runs_of
from distprune.shards.matrix import LocalMatrix, Matrix

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Bands:
    """Bands of ``size`` indices, of which some are here, ascending. ``numbers``: of bands; ``starts``: and the end."""

    def __init__(self, indices: IntArray, size: int) -> None:
        self.numbers, first, band = np.unique(indices // size, return_index=True, return_inverse=True)
        self.starts: IntArray = np.append(first, len(indices))
        self.places: IntArray = band * size + indices % size  # if all bands here were full


@dataclass(frozen=True, eq=False)
class LocalBlocks:
    """Blocks of ``size`` x ``size``: (line bands, column bands).

    Local elements fill ``runs`` of the lines, one after the other; what is between may be elsewhere (FSDP1).
    """

    matrix: Matrix
    size: int
    lines: Bands
    columns: Bands
    runs: Runs

    @staticmethod
    def of(geometry: Geometry, matrix: Matrix, size: int) -> LocalBlocks:
        """Return the blocks of what ``geometry`` holds."""
        local = LocalMatrix.of(geometry, matrix)
        runs: Runs = ((0, geometry.local_numel),)
        if not geometry.local_numel:
            lines = columns = np.empty(0, dtype=np.int64)
        elif local is None:  # ranges of the flattened parameter
            width, held = matrix.num_out if matrix.transposed else matrix.num_in, geometry.dim_runs[0]
            first = held[0][0] // width
            lines, columns = np.arange(first, -(-held[-1][1] // width)), np.arange(width)
            runs = tuple((start - first * width, stop - first * width) for start, stop in held)
        elif (num := local.num_local_out) is None:
            lines, columns = local.rows, local.columns
        else:
            lines = (local.rows[::num, None] // matrix.num_out * matrix.num_in + local.columns).reshape(-1)
            columns = local.rows[:num] % matrix.num_out
        return LocalBlocks(matrix, size, Bands(lines, size), Bands(columns, size), runs)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.lines.numbers), len(self.columns.numbers)

    @cached_property
    def _bounds(self) -> IntArray:
        """Where each line band begins, and the last ends, in lines that are filled."""
        bounds: IntArray = self.lines.starts * self.columns.starts[-1]
        return bounds

    @cached_property
    def _offsets(self) -> IntArray:
        """At which local offset each line band begins, and the last ends."""
        return sum((np.clip(self._bounds - start, 0, stop - start) for start, stop in self.runs), 0 * self._bounds)

    @cached_property
    def _whole(self) -> tuple[IntArray, IntArray]:
        """The line bands, and the column bands, of whole blocks."""
        are_full = np.diff(self._offsets) == self.size * self.columns.starts[-1]
        return np.flatnonzero(are_full), np.flatnonzero(np.diff(self.columns.starts) == self.size)

    @cached_property
    def cut(self) -> IntArray:
        """The places of cut blocks among all blocks here."""
        is_cut = np.ones(self.shape, dtype=np.bool_)
        is_cut[np.ix_(*self._whole)] = False
        is_cut[np.diff(self._offsets) == 0] = False  # bands of which nothing is here
        return np.flatnonzero(is_cut)

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
        lines, columns = self._whole
        across, num = self.matrix.num_in // self.size, self.matrix.num_rows // self.size
        if not self.matrix.transposed and not len(self.cut):
            return Geometry((num, across), (runs_of(self.lines.numbers), runs_of(self.columns.numbers))), slice(None)
        places = (lines[:, None] * self.shape[1] + columns).reshape(-1)
        numbers = self.numbers(places)
        order = np.argsort(numbers, kind="stable")
        return Geometry((num * across,), (runs_of(numbers[order]),)), places[order]

    def chunks(self, device: torch.device) -> Iterator[tuple[slice, slice]]:
        """Yield local offsets, and the line bands that they are of."""
        most = chunk_size(device) // (1 if on_host(device) else 2)  # sums take more words
        step = max(1, most // max(self.size * int(self.columns.starts[-1]), 1))
        for first in range(0, self.shape[0], step):
            last = min(first + step, self.shape[0])
            yield slice(*self._offsets[[first, last]].tolist()), slice(first, last)

    def added_up(self, bands: slice, values: torch.Tensor, offset: int | None) -> torch.Tensor:
        """Return the sums by block of ``values`` of the elements of line ``bands``, each less ``offset``; they wrap."""
        num, offset, size = bands.stop - bands.start, offset or 0, self.size**2
        if not self._is_even(bands, len(values)):
            values, size, parts = values - offset if offset else values, 0, self._parts(bands)
            lines = values.new_zeros(int(self._bounds[bands.stop] - self._bounds[bands.start]))
            for part, of_part in zip(
                parts, torch.split(values, [part.stop - part.start for part in parts]), strict=True
            ):
                lines[part] = of_part
            values = values.new_zeros((num * self.size, self.shape[1] * self.size))
            values[self._places(bands, values.device)] = lines.view(-1, self.columns.starts[-1])
        sums = values.view(num, self.size, self.shape[1], self.size).sum(1).sum(2)  # lines first: by far the faster way
        return sums.to(torch.int64) - wrapped(offset * size)

    def spread(self, bands: slice, of_blocks: torch.Tensor, out: torch.Tensor) -> None:
        """Write what there is ``of_blocks``, bool, of all bands, into ``out``, of the elements of line ``bands``."""
        grid = bands.stop - bands.start, self.size, self.shape[1], self.size
        spread = of_blocks[bands, None, :, None].expand(grid)
        if self._is_even(bands, len(out)):
            out.view(grid).copy_(spread)
        else:
            lines = spread.reshape(grid[0] * self.size, -1)[self._places(bands, out.device)].view(-1)
            torch.cat([lines[part] for part in self._parts(bands)], out=out)

    def _parts(self, bands: slice) -> list[slice]:
        """Return what is filled of the lines of ``bands``."""
        begin, end = self._bounds[[bands.start, bands.stop]].tolist()
        held = [(max(start, begin) - begin, min(stop, end) - begin) for start, stop in self.runs]
        return [slice(*run) for run in held if run[0] < run[1]]

    def _is_even(self, bands: slice, num: int) -> bool:
        """Return whether the ``num`` elements of line ``bands`` fill all blocks of these."""
        return bool(num == (bands.stop - bands.start) * self.size**2 * self.shape[1])

    def _places(self, bands: slice, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where lines and columns of line ``bands`` are among all of their blocks."""
        lines = self.lines.places[self.lines.starts[bands.start] : self.lines.starts[bands.stop]]
        rows = sent(torch.from_numpy(lines - bands.start * self.size), device)
        return rows[:, None], sent(torch.from_numpy(self.columns.places), device)
