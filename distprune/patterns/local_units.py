"""Which units this rank's elements of one parameter are in. No communication.

Nouns: a *unit* is pruned as a whole (a block, a channel), or decided by itself (a row, the m inputs of an N:M group).
It is *cut* on a rank that holds some of it and not all. A *band* is the indices of one dim that are in the same units.
A *box* is a product of ranges of indices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from distprune.shards.device import chunk_size, on_host, sent
from distprune.shards.geometry import Geometry, indices_of
from distprune.shards.matrix import LocalMatrix, Matrix

IntArray = npt.NDArray[np.int64]
Box = tuple[tuple[int, int], ...]


class RowUnits:
    """This rank's elements of one parameter, in units of ``length`` inputs of one row.

    Elements are numbered along the rows of the matrix, one row after the other. ``num_cut``: how many elements are in
    cut units. ``is_dense``: none is, and units follow each other in memory.
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
            columns = None if is_dense else sent(torch.from_numpy(whole), device)
            step = max(1, chunk_size(device) // max(width, 1))
            for first in range(0, num if width else 0, step):
                last = min(first + step, num)
                at: slice | torch.Tensor = slice(begin + first * width, begin + last * width)
                if columns is not None:
                    at = begin + local.offsets(torch.arange(first, last, device=device), columns).view(-1)
                yield at, (last - first) * width


@dataclass(frozen=True)
class Bands:
    """One dim of a box, in ``num`` bands: of ``size`` indices each, or, of uneven ones, ``band_of`` each index."""

    num: int
    size: int = 1
    band_of: IntArray | None = None

    @staticmethod
    def of(bands: IntArray) -> Bands:
        """Return the dim with these ``bands`` of its indices, from 0 up."""
        sizes = np.bincount(bands)
        return Bands(len(sizes), int(sizes[0]), None if (sizes == sizes[0]).all() else bands)


@dataclass(frozen=True)
class UnitBox:
    """Local elements ``at``: a box, of which all combinations of bands of its ``dims`` are units, row-major.

    ``where``: these among the units of the shard.
    """

    at: slice
    where: slice | torch.Tensor
    dims: tuple[Bands, ...]

    def _shape(self, *, of_units: bool = False) -> list[int]:
        """Return the shape of the elements, with two dims, bands and what is within, for even ones; or of the units."""
        shape = []
        for bands in self.dims:
            shape += [bands.num, 1 if of_units else bands.size] if bands.band_of is None else [len(bands.band_of)]
        return shape

    def sums(self, values: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Return the sums by unit of ``values`` of the elements, each less ``offset``: int64, which wrap."""
        num = math.prod([bands.size for bands in self.dims])
        if any(bands.band_of is not None for bands in self.dims):
            values, num = values.to(torch.int64) - offset, 0
        sums = values.view(self._shape())
        for dim, bands in enumerate(self.dims):  # the first before the last: by far the faster way
            if bands.band_of is None:
                sums = sums.sum(dim + 1) if bands.size > 1 else sums.squeeze(dim + 1)
            else:
                band_of = sent(torch.from_numpy(bands.band_of), values.device)
                shape = [*sums.shape[:dim], bands.num, *sums.shape[dim + 1 :]]
                zeros = torch.zeros(shape, dtype=torch.int64, device=values.device)
                sums = zeros.index_add_(dim, band_of, sums)
        sums = sums.view(-1).to(torch.int64)
        return sums - wrapped(offset * num) if offset else sums

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the largest of ``values`` by unit, whose bands are even."""
        return values.view(self._shape()).amax([2 * dim + 1 for dim in range(len(self.dims))]).view(-1)

    def spread(self, stays: torch.Tensor, out: torch.Tensor) -> None:
        """Write what ``stays`` of the units, bool, into ``out``, of the elements."""
        stays = stays.view([bands.num for bands in self.dims])
        for dim, bands in enumerate(self.dims):
            if bands.band_of is not None:
                stays = stays.index_select(dim, sent(torch.from_numpy(bands.band_of), out.device))
        out.view(self._shape()).copy_(stays.view(self._shape(of_units=True)))


class BlockUnits:
    """Blocks of ``size`` x ``size``, of which ``geometry`` holds some elements.

    ``numbers``, ascending: row-major in the parameter's matrices. ``are_cut``: those that are not all here. Elements
    are kept as *lines* of one length, which are the rows of a matrix, or, transposed, the columns.
    """

    def __init__(self, geometry: Geometry, matrix: Matrix, size: int) -> None:
        self._size, self._parts = size, list[tuple[int, IntArray, IntArray]]()
        numbers, nums = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for begin, local in local_matrices(geometry, matrix):
            (line_bands, lines), (column_bands, columns) = (
                np.unique(indices // size, return_inverse=True) for indices in _lines_and_columns(local, matrix)
            )
            if len(lines) and len(columns):
                self._parts.append((begin, lines, columns))
                numbers.append(_block_numbers(line_bands, column_bands, matrix, size).reshape(-1))
                nums.append(np.outer(np.bincount(lines), np.bincount(columns)).reshape(-1))
        self.numbers, self._places, filled = np.concatenate(numbers), None, np.concatenate(nums)
        if not (np.diff(self.numbers) > 0).all():
            self.numbers, self._places = np.unique(self.numbers, return_inverse=True)
            filled = np.bincount(self._places, filled, len(self.numbers))
        self.are_cut = filled < size**2

    def pieces(self, device: torch.device) -> Iterator[UnitBox]:
        """Yield all elements, some bands of lines at a time."""
        passed = 0
        for begin, lines, columns in self._parts:
            num, across = Bands.of(lines).num, Bands.of(columns)
            starts, most = np.searchsorted(lines, np.arange(num + 1)), chunk_size(device)
            parts = 1 if on_host(device) or self._size >= 8 else 2  # sums of small ones take more
            step = max(1, most // parts // (self._size * len(columns)))
            for first in range(0, num, step):
                last = min(first + step, num)
                low, high = starts[[first, last]].tolist()
                where: slice | torch.Tensor = slice(passed + first * across.num, passed + last * across.num)
                if self._places is not None:
                    where = sent(torch.from_numpy(self._places[where]), device)
                at = slice(begin + low * len(columns), begin + high * len(columns))
                yield UnitBox(at, where, (Bands.of(lines[low:high] - first), across))
            passed += num * across.num


class ChannelUnits:
    """Channels along ``dim`` of a parameter of ``shape``, of which ``geometry`` holds some elements: ``numbers``."""

    def __init__(self, geometry: Geometry, shape: Sequence[int], dim: int) -> None:
        is_flat, dim = len(geometry.global_shape) < len(shape), dim % len(shape)
        local_shape = shape if is_flat else geometry.local_shape
        self._shape = math.prod(local_shape[:dim]), local_shape[dim], math.prod(local_shape[dim + 1 :])
        self._elements = geometry.dim_runs[0] if is_flat else ((0, geometry.local_numel),)
        self.numbers = np.arange(shape[dim]) if is_flat else indices_of(geometry.dim_runs[dim]).numpy()

    def pieces(self, device: torch.device) -> Iterator[UnitBox]:
        """Yield all elements, a chunk at a time."""
        passed = 0
        for start, stop in self._elements:
            for box in boxes(start, stop, self._shape, chunk_size(device)):
                before, num, after = (high - low for low, high in box)
                at = slice(passed, passed + before * num * after)
                yield UnitBox(at, slice(*box[1]), (Bands(1, before), Bands(num), Bands(1, after)))
                passed = at.stop


def boxes(start: int, stop: int, shape: Sequence[int], most: int | None = None) -> Iterator[Box]:
    """Yield the boxes that elements ``start`` to ``stop`` of an array of ``shape`` fill one after the other. Local.

    ``most``: elements of a box.
    """
    while start < stop:
        left, inner, dim = min(most or stop, stop - start), 1, len(shape) - 1
        while dim > 0 and start % (inner * shape[dim]) == 0 and left >= inner * shape[dim]:
            inner, dim = inner * shape[dim], dim - 1
        before, index = divmod(start // inner, shape[dim])
        num = min(left // inner, shape[dim] - index)
        outer = (int(i) for i in np.unravel_index(before, shape[:dim]))
        yield (*((i, i + 1) for i in outer), (index, index + num), *((0, size) for size in shape[dim + 1 :]))
        start += num * inner


def local_matrices(geometry: Geometry, matrix: Matrix) -> list[tuple[int, LocalMatrix]]:
    """Return the rows and columns of local elements: of all, or of each box of a flattened parameter (FSDP1). Local.

    Before each stands the local offset at which it begins.
    """
    if len(geometry.global_shape) > 1:
        return [(0, LocalMatrix.of(geometry, matrix))]
    sizes = (matrix.num_in, matrix.num_out) if matrix.transposed else (matrix.num_out, matrix.num_in)
    shape, parts, begin = (matrix.num_matrices, *sizes), list[tuple[int, LocalMatrix]](), 0
    for start, stop in geometry.dim_runs[0]:
        for box in boxes(start, stop, shape):
            part = Geometry(shape, tuple((bounds,) for bounds in box))
            parts.append((begin, LocalMatrix.of(part, matrix)))
            begin += part.local_numel
    return parts


def wrapped(number: int) -> int:
    """Return what an int64 holds of ``number``."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _lines_and_columns(local: LocalMatrix, matrix: Matrix) -> tuple[IntArray, IntArray]:
    """Return the lines of all matrices, and the columns, that are here, in local order."""
    if (num := local.num_local_out) is None:
        return local.rows, local.columns
    if not num:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    lines = local.rows[::num, None] // matrix.num_out * matrix.num_in + local.columns
    return lines.reshape(-1), local.rows[:num] % matrix.num_out


def _block_numbers(line_bands: IntArray, column_bands: IntArray, matrix: Matrix, size: int) -> IntArray:
    """Return the numbers of blocks, (line bands, column bands)."""
    across, line, column = matrix.num_in // size, line_bands[:, None], column_bands
    if not matrix.transposed:
        return line * across + column
    return (line // across * (matrix.num_out // size) + column) * across + line % across
