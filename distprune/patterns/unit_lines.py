"""Where the elements of blocks or channels are on a shard, and which unit each is of. No communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from distprune.shards.device import chunk_size, sent, sent_together
from distprune.shards.geometry import Geometry, runs_of

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_FEW = 1 << 20  # elements: what is known of so many is kept for shards, and windows, that are laid out alike
_WORTH = 1 << 5  # of a chunk, the part that lines which share what is within them must have to be taken together


class UnitLines:
    """The units of which a shard holds a part, and where their elements are. Shards laid out alike share one.

    ``ids``: the numbers of the units in the whole parameter, ascending; here they are numbered from 0. The local
    elements lie in lines of equal length. The unit of element j in line i is ``starts[i % len(starts)] + within[i //
    len(starts), j]``. ``first``: the flat index at which line 0 begins, if the shard is cut anywhere (FSDP1); without
    it local elements fill the lines from 0 on. ``num_elements``: of each unit here; ``None``: they are counted. A whole
    unit has ``size`` elements. ``homes(ids, ranks)``: the homes of some units. No communication.
    """

    def __init__(
        self,
        place: tuple[Geometry, torch.device],
        ids: IntArray,
        lines: tuple[torch.Tensor, torch.Tensor, int | None],
        size: int,
        num_elements: IntArray | None,
        homes: Callable[[IntArray, int], IntArray],
    ) -> None:
        self._geometry, self._device = place
        self.ids, self.size, self.homes = ids, size, homes
        starts, within, self._first = lines
        self._tables = starts, within
        if num_elements is None:
            counts = torch.zeros(len(ids), dtype=torch.int64, device="cpu")
            for _, tile in self._tiles(self._tables):
                tile.count(counts)
            num_elements = counts.numpy()
        self.is_whole: BoolArray = (num_elements == size) & (num_elements > 0)
        self.cut = np.flatnonzero((num_elements > 0) & ~self.is_whole)
        self.num_cut = len(self.cut)
        some = np.flatnonzero(self.is_whole)
        self.whole = slice(None) if len(some) == len(ids) else torch.from_numpy(some)
        self.whole_runs = runs_of(ids[self.is_whole])

    @cached_property
    def _there(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``starts`` and ``within`` on the device."""
        starts, within = sent_together(self._tables, self._device)
        return starts, within

    @cached_property
    def whole_there(self) -> slice | torch.Tensor:
        """The numbers of the whole units, on the device."""
        return self.whole if isinstance(self.whole, slice) else sent(self.whole, self._device)

    @cached_property
    def cut_there(self) -> torch.Tensor:
        """The numbers of the cut units, on the device."""
        return sent(torch.from_numpy(self.cut), self._device)

    @staticmethod
    def send(lines: Iterable[UnitLines]) -> None:
        """Send what devices need of all of ``lines``: one copy to each."""
        of_device: dict[torch.device, list[UnitLines]] = {}
        for each in lines:
            of_device.setdefault(each._device, []).append(each)
        for device, own in of_device.items():
            tables = iter(sent_together([table for each in own for table in each._tables], device))
            for each in own:
                each._there = next(tables), next(tables)

    def tiles(self) -> Iterable[tuple[slice, Tile]]:
        """Return local elements and their units: whole lines, or parts of some, if that is worth it."""
        return self._few if self._geometry.local_numel <= _FEW else self._tiles(self._there)

    @cached_property
    def _few(self) -> list[tuple[slice, Tile]]:
        return [*self._tiles(self._there)]

    def _chunks(self, tables: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield local elements, and the number of the unit of each, where the ``tables`` are."""
        (starts, within), geometry, step = tables, self._geometry, chunk_size(self._device)
        device = starts.device
        width, num = within.shape[1], len(starts)
        for start in range(0, geometry.local_numel, step):
            stop = min(start + step, geometry.local_numel)
            if self._first is None and stop - start >= width:  # line by line, which is faster
                lines = torch.arange(start // width, -(-stop // width), device=device)
                units = starts[lines % num, None] + within[lines // num]
                yield slice(start, stop), units.view(-1)[start % width :][: stop - start]
            else:
                at = torch.arange(start, stop, device=device)
                if self._first is not None:
                    at = geometry.flat_indices(start, stop, device) - self._first
                lines = at // width
                yield slice(start, stop), starts[lines % num] + within[lines // num, at % width]

    def _tiles(self, tables: tuple[torch.Tensor, torch.Tensor]) -> Iterator[tuple[slice, Tile]]:
        """Yield local elements and their units, where ``tables`` are: whole lines, or parts, if that is worth it."""
        of_lines, of_columns = (table.numpy() for table in self._tables)
        (num_panels, width), num, size = of_columns.shape, len(of_lines), chunk_size(self._device)
        geometry, first = self._geometry, 0 if self._first is None else None
        if self._first is not None and geometry.flat_start is not None:
            first = geometry.flat_start - self._first
        are_alike = self._tables[1].stride(0) == 0
        if first is None or (num_panels > 1 and not are_alike and num * width * _WORTH < size):
            yield from ((at, Tile(units[None, None])) for at, units in self._chunks(tables))
            return
        (starts, within), place, end = tables, first, first + geometry.local_numel
        while place < end:
            (line, column), num_left = divmod(place, width), end - place
            panel, line = divmod(line, num)
            num_alike = 1
            if are_alike and not line and not column and min(size, num_left) >= num * width:
                lines, columns = slice(0, num), slice(0, width)
                num_alike = min(size, num_left) // (num * width)
            elif column or num_left < width or width > size:  # a part of a line
                lines, columns = slice(line, line + 1), slice(column, min(width, column + min(size, num_left)))
            else:
                lines, columns = slice(line, min(num, line + min(size, num_left) // width)), slice(0, width)
            per_line, per_column = _run(of_lines[lines]), _run(of_columns[panel, columns])
            first_unit, num_units = _follow(of_lines[lines][::per_line], of_columns[panel, columns][::per_column])
            run = None if first_unit is None else slice(first_unit, first_unit + num_units)
            units = starts[lines][::per_line, None] + within[panel, columns][::per_column]
            stop = place + num_alike * (lines.stop - lines.start) * (columns.stop - columns.start)
            yield slice(place - first, stop - first), Tile(units[None], num_alike, per_line, per_column, run)
            place = stop


@dataclass(frozen=True)
class Tile:
    """The units of some lines, (shards, lines / ``per_line``, columns / ``per_column``).

    So many side by side share one. Of each shard, ``num_panels`` of such lines follow each other, of the same units.
    """

    units: torch.Tensor
    num_panels: int = 1
    per_line: int = 1
    per_column: int = 1
    run: slice | None = None  # their numbers, if they follow each other

    def repeated(self, num: int, num_units: int) -> Tile:
        """Return the tile of so many shards, one after the other, of ``num_units`` each."""
        firsts = torch.arange(0, num * num_units, num_units, device=self.units.device)
        return dataclasses.replace(self, units=firsts[:, None, None] + self.units, run=None)

    def _parts(self, of_elements: torch.Tensor) -> torch.Tensor:
        num_shards, num_lines, num_columns = self.units.shape
        return of_elements.view(num_shards, self.num_panels, num_lines, self.per_line, num_columns, self.per_column)

    def add(self, totals: torch.Tensor, values: torch.Tensor, offset: int = 0) -> None:
        """Add ``values`` of the elements, int64 or bool, each less ``offset``, to the ``totals`` of their units, int64.

        Sums wrap.
        """
        sums = self._parts(values)
        for dim in (1, 3, 5):  # panels and lines first: by far the faster way
            sums = sums.sum(dim, keepdim=True) if sums.shape[dim] > 1 else sums
        sums = sums.reshape(-1).to(totals.dtype)
        if offset:
            sums = sums - _wrapped(offset * self.num_panels * self.per_line * self.per_column)
        if self.run is not None:
            totals[self.run].add_(sums)
        else:
            totals.index_add_(0, self.units.reshape(-1), sums)

    def count(self, totals: torch.Tensor) -> None:
        """Add to the ``totals`` of units, int64, how many elements each has."""
        units = self.units.reshape(-1)
        totals.index_add_(0, units, torch.full_like(units, self.num_panels * self.per_line * self.per_column))

    def take_largest(self, largest: torch.Tensor, values: torch.Tensor) -> None:
        """Keep in ``largest``, of the units, the largest of the ``values`` of their elements; both int64."""
        most = self._parts(values).amax((1, 3, 5))
        largest.scatter_reduce_(0, self.units.reshape(-1), most.reshape(-1), "amax")

    def spread(self, of_units: torch.Tensor, out: torch.Tensor) -> None:
        """Write what there is ``of_units``, bool, into ``out``, of the elements."""
        own = torch.take(of_units, self.units) if self.run is None else of_units[self.run].view(self.units.shape)
        self._parts(out).copy_(own[:, None, :, None, :, None])


def _wrapped(number: int) -> int:
    """Return what an int64 holds of ``number``."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _run(units: IntArray) -> int:
    """Return the greatest length of stretches, each of equal ones, into which ``units`` can be divided."""
    return int(np.gcd.reduce(np.append(np.flatnonzero(np.diff(units)) + 1, len(units))))


def _follow(of_lines: IntArray, of_columns: IntArray) -> tuple[int | None, int]:
    """Return the first of the units of some lines and columns, if they follow each other, and how many there are."""
    num = len(of_columns)
    follow = (np.diff(of_columns) == 1).all() and (np.diff(of_lines) == num).all()
    return int(of_lines[0] + of_columns[0]) if follow else None, len(of_lines) * num
