"""Units on a shard: blocks or channels, which are pruned as a whole.

The sums of their elements' scores are the same in any order, on a grid common to all units that compete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives import max_together
from distprune.patterns.base import Ranked
from distprune.patterns.inquiry import Question
from distprune.scores import LocalScores, Score, grid_scale, on_grid
from distprune.selection import Order, Put, raise_nans
from distprune.shards import (
    SMALL,
    Geometry,
    all_finite,
    chunk_size,
    count_true,
    fetched,
    is_small,
    on_host,
    runs_of,
    sent,
)

VALUES = Order("value", torch.float64)  # of extremes
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_WORTH = 1 << 5  # of a chunk, the part that lines which share what is within them must have to be taken together
SUM, NUM_INFINITE, NUM_GONE, NUM_COLUMNS = 0, 1, 2, 3  # of a table of units; those of minus infinity count -1


def unit_order(score: Score) -> Order:
    """Return the order in which the units of ``score`` compete."""
    return Order("value", score.dtype(torch.float32) if score.scores_units else torch.int64)


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
        self.ids, self.homes = ids, homes
        starts, within, self._first = lines
        self._host_starts, self._host_within = starts.numpy(), within.numpy()
        self._starts, self._within = sent(starts, self._device), sent(within, self._device)
        if num_elements is None:
            there = torch.zeros(len(ids), dtype=torch.int64, device=self._device)
            for at, units in self.tiles():
                units.add(there, torch.ones(at.stop - at.start, dtype=torch.int64, device=self._device))
            num_elements = fetched([there])[0].numpy()
        self.is_whole: BoolArray = (num_elements == size) & (num_elements > 0)
        self.is_cut: BoolArray = (num_elements > 0) & ~self.is_whole
        self.num_cut = int(np.count_nonzero(self.is_cut))
        self.whole = torch.from_numpy(np.flatnonzero(self.is_whole))
        self.whole_runs = runs_of(ids[self.is_whole])

    def tiles(self) -> Iterable[tuple[slice, _Tile]]:
        """Return local elements and their units: whole lines, or parts of some, if that is worth it."""
        return self._few if self._geometry.local_numel <= SMALL else self._tiles()

    @cached_property
    def _few(self) -> list[tuple[slice, _Tile]]:
        return [*self._tiles()]

    def _chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield local elements, and the number of the unit of each."""
        geometry, device, step = self._geometry, self._device, chunk_size(self._device)
        width, num = self._within.shape[1], len(self._starts)
        for start in range(0, geometry.local_numel, step):
            stop = min(start + step, geometry.local_numel)
            if self._first is None and stop - start >= width:  # line by line, which is faster
                lines = torch.arange(start // width, -(-stop // width), device=device)
                units = self._starts[lines % num, None] + self._within[lines // num]
                yield slice(start, stop), units.view(-1)[start % width :][: stop - start]
            else:
                at = torch.arange(start, stop, device=device)
                if self._first is not None:
                    at = geometry.flat_indices(start, stop, device) - self._first
                lines = at // width
                yield slice(start, stop), self._starts[lines % num] + self._within[lines // num, at % width]

    def _tiles(self) -> Iterator[tuple[slice, _Tile]]:
        """Yield local elements and their units: whole lines, or parts of some, if that is worth it."""
        (num_panels, width), num, size = self._within.shape, len(self._starts), chunk_size(self._device)
        geometry, first = self._geometry, 0 if self._first is None else None
        if self._first is not None and geometry.flat_start is not None:
            first = geometry.flat_start - self._first
        if first is None or (num_panels > 1 and num * width * _WORTH < size):
            yield from ((at, _Tile(units[None], 1, 1)) for at, units in self._chunks())
            return
        place, end = first, first + geometry.local_numel
        while place < end:
            (line, column), num_left = divmod(place, width), end - place
            panel, line = divmod(line, num)
            if column or num_left < width or width > size:  # a part of a line
                lines, columns = slice(line, line + 1), slice(column, min(width, column + min(size, num_left)))
            else:
                lines, columns = slice(line, min(num, line + min(size, num_left) // width)), slice(0, width)
            per_line, per_column = _run(self._host_starts[lines]), _run(self._host_within[panel, columns])
            units = self._starts[lines][::per_line, None] + self._within[panel, columns][::per_column]
            stop = place + (lines.stop - lines.start) * (columns.stop - columns.start)
            yield slice(place - first, stop - first), _Tile(units, per_line, per_column)
            place = stop


class ShardUnits:
    """The units of shards that are laid out alike, and what their elements make of them. No communication.

    ``scores``: of one shard, or of several small ones on the host (see :meth:`kind`), whose elements are read together.
    """

    def __init__(self, scores: Sequence[LocalScores], lines: UnitLines) -> None:
        self.scores, self.lines = scores, lines
        self._first = scores[0]
        self._device = self._first.device

    @staticmethod
    def kind(scores: LocalScores) -> object:
        """Return what shards that are laid out alike have in common if they are read together; ``None``: none are."""
        numel = scores.shard.geometry.local_numel
        return (scores.shard.local.dtype, scores.shard.owned) if numel and is_small(numel, scores.device) else None

    def empty_table(self, num: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the table of ``num`` units without elements."""
        table = torch.zeros((num, NUM_COLUMNS), dtype=torch.int64, device=device)
        if self._first.score.combined_by != "sum":
            table[:, SUM] = VALUES.first
        return table

    def table(self, scales: Sequence[int]) -> torch.Tensor:
        """Return what the local units add up to, (shards, units, NUM_COLUMNS). ``scales``: by shard.

        Without scales only what is gone is there. Of extremes, SUM is the key of the largest value, or of the largest
        of the negative values.
        """
        num, sign = len(self.scores), _sign(self._first.score)
        table = self.empty_table(num * len(self.lines.ids), self._device)
        for at, units in self._tiles():
            if not scales:
                gone = self._gone(at)
            elif sign is not None:
                values, gone = self._addends(at)
                units.take_largest(table[:, SUM], VALUES.keys(values * sign))
            else:
                values, gone = self._addends(at)
                if not on_host(self._device) or not all_finite(values):
                    infinite = values.isinf()
                    units.add(table[:, NUM_INFINITE], infinite * values.sign().to(torch.int64))
                    values = values.masked_fill(infinite, 0.0)
                units.add(table[:, SUM], on_grid(values.view(num, -1), scales).view(-1))
            if gone is not None:
                units.add(table[:, NUM_GONE], gone.to(torch.int64))
        return table.view(num, len(self.lines.ids), NUM_COLUMNS)

    def largest(self) -> torch.Tensor:
        """Return of each shard the largest size of a finite addend, and how many scores are NaN: float64."""
        found = torch.zeros((len(self.scores), 2), dtype=torch.float64, device=self._device)
        for start, stop in self._first.chunks():
            at = slice(start, stop)
            if on_host(self._device) and self._gone(at) is None:
                own = self._values(at)
                own = own if own.element_size() > 1 else own.double()  # torch knows no extremes of 8-bit floats
                both = torch.aminmax(own) if len(found) == 1 else torch.aminmax(own.view(len(found), -1), dim=1)
                extremes = torch.stack(both).view(2, -1).to(torch.float64).abs().amax(0)
                if extremes.isfinite().all():  # a NaN is both extremes
                    torch.maximum(found[:, 0], extremes, out=found[:, 0])
                    continue
            values = self._addends(at)[0].view(len(self.scores), -1)
            found[:, 1] += values.isnan().sum(1)
            torch.maximum(found[:, 0], values.nan_to_num_(0.0, 0.0, 0.0).abs_().amax(1), out=found[:, 0])
        return found

    def decide(self, keep: torch.Tensor, puts: Sequence[Put]) -> Sequence[torch.Tensor]:
        """Put what stays of the elements, given which units stay, (shards, units).

        Return of each shard the counts of ``Choice.decide``, 0 NaNs.
        """
        num, stays = len(self.scores), sent(keep.view(-1), self._device)
        counts = torch.zeros((num, 3), dtype=torch.int64, device=self._device)
        for at, units in self._tiles():
            numel = at.stop - at.start
            if num == 1:
                flags = puts[0].flags(at, self._device)
            else:
                flags = torch.empty(num * numel, dtype=torch.bool, device=self._device)
            units.spread(stays, flags)
            if not self._first.regrows and (gone := self._gone(at)) is not None:
                flags.logical_and_(~gone)
                counts[:, 1] += gone.view(num, -1).sum(1)
            counts[:, 0] += numel - (count_true(flags) if num == 1 else flags.view(num, -1).sum(1))
            for put, own in zip(puts, torch.split(flags, numel), strict=True):
                put.stays(at, own)
        return counts.unbind()

    def question(self, i: int, first: int, table: torch.Tensor, num_ranks: int) -> Question:
        """Return what the homes of the cut units of shard ``i`` are told, and asked: of what this rank owns, scores."""
        cut = np.flatnonzero(self.lines.is_cut)
        told = table[torch.from_numpy(cut)] if self.scores[i].shard.owned else self.empty_table(len(cut))
        rows = np.column_stack([first + self.lines.ids[cut], told.numpy()])
        return Question(self.lines.homes(self.lines.ids[cut], num_ranks), lambda places: rows[places].tobytes())

    def _tiles(self) -> Iterable[tuple[slice, _Tile]]:
        """Return local elements, and the units of those of all shards."""
        num = len(self.scores)
        if num == 1:
            return self.lines.tiles()
        return ((at, tile.repeated(num, len(self.lines.ids))) for at, tile in self.lines.tiles())

    def _values(self, at: slice) -> torch.Tensor:
        """Return the scores ``at``, of one shard after the other."""
        if len(self.scores) == 1:
            return self._first.values(at)
        return self._first.joined_values([(each, at) for each in self.scores])

    def _gone(self, at: slice) -> torch.Tensor | None:
        if len(self.scores) == 1:
            return self._first.is_gone(at)
        return self._first.joined_gone([(each, at) for each in self.scores])

    def _addends(self, at: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the elements ``at`` add to their units, float64, and which of them are gone (``None``: none)."""
        first, values, gone = self._first, self._values(at).to(torch.float64), self._gone(at)
        if first.score.ordered_by == "magnitude":
            values = values.abs()
        if gone is not None and not (first.counts_gone or first.regrows):
            values = values.masked_fill(gone, first.score.of_zero)
        return values, gone


@dataclass(frozen=True)
class _Tile:
    """The units of some lines, (lines / ``per_line``, columns / ``per_column``): so many side by side share one."""

    units: torch.Tensor
    per_line: int
    per_column: int

    def repeated(self, num: int, num_units: int) -> _Tile:
        """Return the tile of so many shards, one after the other, of ``num_units`` each."""
        firsts = torch.arange(0, num * num_units, num_units, device=self.units.device)
        units = (firsts[:, None, None] + self.units).flatten(0, 1)
        return _Tile(units, self.per_line, self.per_column)

    def _parts(self, of_elements: torch.Tensor) -> torch.Tensor:
        num_lines, num_columns = self.units.shape
        return of_elements.view(num_lines, self.per_line, num_columns, self.per_column)

    def add(self, totals: torch.Tensor, values: torch.Tensor) -> None:
        """Add ``values`` of the elements to the ``totals`` of their units; both int64."""
        sums = self._parts(values)
        sums = sums.sum(1) if self.per_line > 1 else sums[:, 0]  # lines first: by far the faster way
        sums = sums.sum(2) if self.per_column > 1 else sums[:, :, 0]
        totals.index_add_(0, self.units.reshape(-1), sums.reshape(-1))

    def take_largest(self, largest: torch.Tensor, values: torch.Tensor) -> None:
        """Keep in ``largest``, of the units, the largest of the ``values`` of their elements; both int64."""
        most = self._parts(values).amax((1, 3))
        largest.scatter_reduce_(0, self.units.reshape(-1), most.reshape(-1), "amax")

    def spread(self, of_units: torch.Tensor, out: torch.Tensor) -> None:
        """Write what there is ``of_units``, bool, into ``out``, of the elements."""
        self._parts(out).copy_(torch.take(of_units, self.units)[:, None, :, None])


def _run(units: IntArray) -> int:
    """Return the greatest length of stretches, each of equal ones, into which ``units`` can be divided."""
    return int(np.gcd.reduce(np.append(np.flatnonzero(np.diff(units)) + 1, len(units))))


def agree_on_scales(
    ranked: Ranked, num_addends: Sequence[int], parts: Callable[[], Sequence[ShardUnits]], *, together: bool
) -> list[int]:
    """Return the scale of every member's grid, or, ``together``, of one grid for all. Every rank must call it.

    ``num_addends``: the elements of a unit, by member. ``parts``: all shards of this rank. One round of 8 bytes a
    parameter.

    Raises:
        ValueError: on every rank: scores are NaN.
    """
    num_nans: dict[str, int] = {}

    def fill(largest: torch.Tensor) -> None:
        owned = [part for part in parts() if part.scores[0].shard.owned]
        for part, found in zip(owned, fetched([part.largest() for part in owned]), strict=True):
            for scores, (size, nans) in zip(part.scores, found.tolist(), strict=True):
                name = scores.shard.name
                largest[ranked.index[name]] = torch.inf if nans else size
                if nans:
                    num_nans[name] = int(nans)

    found = max_together(ranked.comm, (len(num_addends),), fill, torch.float64).tolist()
    of_all, most = max(found, default=0.0), max(num_addends, default=0)
    if math.isinf(of_all):
        raise_nans(ranked.comm, num_nans)
    if together:
        return [grid_scale(most, of_all)] * len(found)
    return [grid_scale(num, largest) for num, largest in zip(num_addends, found, strict=True)]


def joined_tables(score: Score, num: int, units: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the table of ``num`` units of which ``rows``, of tables, are parts; ``units``: of each its number."""
    table = torch.zeros((num, NUM_COLUMNS), dtype=torch.int64, device="cpu").index_add_(0, units, rows)
    if _sign(score) is not None:
        table[:, SUM] = VALUES.first
        table[:, SUM].scatter_reduce_(0, units, rows[:, SUM].contiguous(), "amax")
    return table


def _sign(score: Score) -> float | None:
    """Return by what scores are multiplied of which the largest counts; ``None`` where they are summed."""
    return {"sum": None, "max": 1.0, "min": -1.0}[score.combined_by]


def sums_of(table: torch.Tensor, score: Score) -> torch.Tensor:
    """Return the keys of units, int64: the sums of their elements, negated if the score is ``descending``; or extremes.

    With more +inf than -inf the sum is +inf, and the reverse; with as many of both, the sum of the finite elements.
    """
    order = unit_order(score)
    if score.combined_by != "sum":
        return table[..., SUM] if score.combined_by == "max" else -table[..., SUM]
    sums = table[..., SUM].masked_fill(table[..., NUM_INFINITE] > 0, order.last)
    sums = sums.masked_fill(table[..., NUM_INFINITE] < 0, order.first)
    return -sums if score.descending else sums


@dataclass(frozen=True)
class UnitKeys:
    """The units of one member on this rank, as they compete. See ``selection/scan.py``."""

    values: torch.Tensor  # what they are ranked by
    is_gone: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.values.device

    def keys(self, order: Order, at: slice | torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        return order.keys(self.values[at]).masked_fill_(self.is_gone[at], order.gone)

    def joined_keys(
        self, order: Order, pieces: Sequence[tuple[UnitKeys, slice]], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        values = torch.cat([units.values[at] for units, at in pieces])
        is_gone = torch.cat([units.is_gone[at] for units, at in pieces])
        return order.keys(values, out).masked_fill_(is_gone, order.gone)

    def bits(self, order: Order) -> None:
        """Return nothing: the keys have to be computed."""
