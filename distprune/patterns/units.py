"""Units on a shard: blocks or channels, which are pruned as a whole.

The sums of their elements' scores are the same in any order, on a grid common to all units that compete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives import max_together
from distprune.patterns.base import Ranked
from distprune.scores import LocalScores, Score, grid_scale, on_grid
from distprune.selection import Order, raise_nans
from distprune.shards import Geometry, all_finite, chunk_size, count_true, fetched, on_host, sent

__all__ = [
    "NUM_COLUMNS",
    "NUM_GONE",
    "IntArray",
    "ShardUnits",
    "UnitKeys",
    "addends",
    "agree_on_scales",
    "sums_of",
    "unit_order",
]

IntArray = npt.NDArray[np.int64]

_WORTH = 1 << 12  # elements of lines that share what is within them: with fewer, to loop over such takes longer
SUM, NUM_INFINITE, NUM_GONE, NUM_COLUMNS = 0, 1, 2, 3  # of a table of units; those of minus infinity count -1


def unit_order(score: Score) -> Order:
    """Return the order in which the units of ``score`` compete."""
    return Order("value", score.dtype(torch.float32) if score.scores_units else torch.int64)


class ShardUnits:
    """The units of which one shard holds a part, numbered from 0 to ``num_units``. No communication.

    The local elements lie in lines of equal length. The unit of element j in line i is ``starts[i % len(starts)] +
    within[i // len(starts), j]``. ``first``: the flat index at which line 0 begins, if the shard is cut anywhere
    (FSDP1); without it local elements fill the lines from 0 on.
    """

    def __init__(
        self, scores: LocalScores, num_units: int, starts: torch.Tensor, within: torch.Tensor, first: int | None
    ) -> None:
        self.scores = scores
        self.num_units = num_units
        self._starts, self._within = sent(starts, scores.device), sent(within, scores.device)
        self._first = first

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield local elements, and the number of the unit of each."""
        geometry, device = self.scores.shard.geometry, self.scores.device
        width, num = self._within.shape[1], len(self._starts)
        for start, stop in self.scores.chunks():
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

    def tiles(self) -> Iterator[tuple[slice, _Elements | _Tile]]:
        """Yield local elements and their units: on the host whole lines, or parts of some, if that is worth it."""
        (num_panels, width), num, size = self._within.shape, len(self._starts), chunk_size(self.scores.device)
        geometry, first = self.scores.shard.geometry, 0 if self._first is None else None
        if self._first is not None and geometry.flat_start is not None:
            first = geometry.flat_start - self._first
        is_worth_it = num_panels == 1 or num * width >= _WORTH
        if first is None or not on_host(self.scores.device) or not is_worth_it:
            yield from ((at, _Elements(units)) for at, units in self.chunks())
            return
        starts, within = self._starts.numpy(), self._within.numpy()
        panel, columns = -1, np.empty(0, dtype=np.int64)
        place, end = first, first + geometry.local_numel
        while place < end:
            line, column = divmod(place, width)
            if line // num != panel:
                panel = line // num
                columns = _groups(within[panel])
            line, num_left = line % num, end - place
            if column or num_left < width or width > size:  # a part of a line
                part = within[panel, column : column + min(size, num_left)]
                tile = _Tile(starts[line : line + 1], part, _groups(part))
            else:
                tile = _Tile(starts[line : line + min(size, num_left) // width], within[panel], columns)
            yield slice(place - first, place - first + tile.numel), tile
            place += tile.numel

    def table(self, scale: int | None) -> torch.Tensor:
        """Return what the local units add up to, (units, NUM_COLUMNS); without ``scale`` only what is gone is there."""
        scores = self.scores
        table = torch.zeros((self.num_units, NUM_COLUMNS), dtype=torch.int64, device=scores.device)
        for at, units in self.tiles():
            if scale is None:
                gone = scores.is_gone(at)
            else:
                values, gone = addends(scores, at)
                if not on_host(scores.device) or not all_finite(values):
                    infinite = values.isinf()
                    units.add(table[:, NUM_INFINITE], infinite * values.sign().to(torch.int64))
                    values = values.masked_fill(infinite, 0.0)
                units.add(table[:, SUM], on_grid(values, scale))
            if gone is not None:
                units.add(table[:, NUM_GONE], gone.to(torch.int64))
        return table

    def spread(self, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what becomes of the elements, given which units stay: the mask, and how many are gone and go."""
        scores, stays = self.scores, sent(keep, self.scores.device)
        mask = torch.empty(scores.shard.geometry.local_shape, dtype=torch.bool, device=scores.device)
        counts = torch.zeros(2, dtype=torch.int64, device=scores.device)
        for at, units in self.tiles():
            chunk = mask.view(-1)[at]
            units.spread(stays, chunk)
            if (gone := scores.is_gone(at)) is not None:
                chunk.logical_and_(~gone)
                counts[0] += gone.sum()
        counts[1] = mask.numel() - count_true(mask)
        return mask, counts


@dataclass(frozen=True)
class _Elements:
    """The unit of each of some elements."""

    units: torch.Tensor

    def add(self, totals: torch.Tensor, values: torch.Tensor) -> None:
        """Add ``values`` of the elements to the ``totals`` of their units; both int64."""
        totals.index_add_(0, self.units, values)

    def spread(self, of_units: torch.Tensor, out: torch.Tensor) -> None:
        """Write what there is ``of_units``, bool, into ``out``, of the elements."""
        torch.take(of_units, self.units, out=out)


@dataclass(frozen=True)
class _Tile:
    """The units of some lines, on the host: ``starts[i] + within[j]``. Equal ones side by side are taken together.

    ``columns``: where other ones begin in ``within``.
    """

    starts: IntArray
    within: IntArray
    columns: IntArray

    @property
    def numel(self) -> int:
        return len(self.starts) * len(self.within)

    def add(self, totals: torch.Tensor, values: torch.Tensor) -> None:
        """As of :class:`_Elements`."""
        lines, of_lines = values.numpy().reshape(len(self.starts), -1), _groups(self.starts)
        size = len(lines) // len(of_lines)
        if np.array_equal(of_lines, np.arange(0, len(lines), size)):  # lines first: that is by far the faster way
            sums = lines.reshape(len(of_lines), size, -1).sum(axis=1) if size > 1 else lines
        else:
            sums = np.add.reduceat(lines, of_lines, axis=0)
        if len(self.columns) < len(self.within):
            sums = np.add.reduceat(sums, self.columns, axis=1)
        units = self.starts[of_lines, None] + self.within[self.columns]
        totals.index_add_(0, torch.from_numpy(units.reshape(-1)), torch.from_numpy(sums.reshape(-1)))

    def spread(self, of_units: torch.Tensor, out: torch.Tensor) -> None:
        """As of :class:`_Elements`."""
        of_lines, columns = _groups(self.starts), self.columns if len(self.columns) == 1 else slice(None)
        found = of_units.numpy()[self.starts[of_lines, None] + self.within[columns]]
        num_lines = np.diff(of_lines, append=len(self.starts))
        out.numpy().reshape(len(self.starts), -1)[:] = np.repeat(found, num_lines, axis=0)


def _groups(units: IntArray) -> IntArray:
    """Return where equal ones side by side begin."""
    return np.flatnonzero(np.diff(units, prepend=-1))


def addends(scores: LocalScores, at: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what the elements ``at`` add to their units, float64, and which of them are gone (``None``: none)."""
    values, gone = scores.values(at).to(torch.float64), scores.is_gone(at)
    if scores.score.ordered_by == "magnitude":
        values = values.abs()
    if gone is not None and not scores.counts_gone:
        values = values.masked_fill(gone, scores.score.of_zero)
    return values, gone


def agree_on_scales(
    ranked: Ranked, scores: Callable[[], Mapping[int, LocalScores]], num_addends: Sequence[int], *, together: bool
) -> list[int]:
    """Return the scale of every member's grid, or, ``together``, of one grid for all. Every rank must call it.

    ``num_addends``: the elements of a unit, by member. One round of 8 bytes a parameter.

    Raises:
        ValueError: on every rank: scores are NaN.
    """
    num_nans: dict[str, int] = {}

    def fill(largest: torch.Tensor) -> None:
        found = []
        for of_shard in scores().values():
            found.append(torch.zeros(2, dtype=torch.float64, device=of_shard.device))  # largest, NaNs
            for start, stop in of_shard.chunks():
                at = slice(start, stop)
                if on_host(of_shard.device) and of_shard.is_gone(at) is None:
                    own = of_shard.values(at)
                    own = own if own.element_size() > 1 else own.double()  # torch knows no extremes of 8-bit floats
                    extremes = torch.stack(torch.aminmax(own)).to(torch.float64).abs().max()
                    if math.isfinite(extremes):  # a NaN is both extremes
                        found[-1][0] = found[-1][0].maximum(extremes)
                        continue
                values, _ = addends(of_shard, at)
                found[-1][1] += values.isnan().sum()
                found[-1][0] = found[-1][0].maximum(values.nan_to_num_(0.0, 0.0, 0.0).abs_().max())
        for (member, of_shard), numbers in zip(scores().items(), fetched(found), strict=True):
            largest[member], nans = numbers.tolist()
            if nans:
                num_nans[of_shard.shard.name], largest[member] = int(nans), torch.inf

    found = max_together(ranked.comm, (len(num_addends),), fill, torch.float64).tolist()
    of_all, most = max(found, default=0.0), max(num_addends, default=0)
    if math.isinf(of_all):
        raise_nans(ranked.comm, num_nans)
    if together:
        return [grid_scale(most, of_all)] * len(found)
    return [grid_scale(num, largest) for num, largest in zip(num_addends, found, strict=True)]


def sums_of(table: torch.Tensor, score: Score) -> torch.Tensor:
    """Return the keys of units, int64: the sums of their elements, negated if the score is ``descending``.

    With more +inf than -inf the sum is +inf, and the reverse; with as many of both, the sum of the finite elements.
    """
    order = unit_order(score)
    sums = table[:, SUM].masked_fill(table[:, NUM_INFINITE] > 0, order.last)
    sums = sums.masked_fill(table[:, NUM_INFINITE] < 0, order.first)
    return -sums if score.descending else sums


@dataclass(frozen=True)
class UnitKeys:
    """The units of one member on this rank, as they compete. See ``selection/scan.py``."""

    name: str
    geometry: Geometry  # of the units
    values: torch.Tensor  # what they are ranked by
    is_gone: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.values.device

    def keys(self, order: Order, at: slice | torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        return order.keys(self.values[at]).masked_fill_(self.is_gone[at], order.gone)

    def bits(self, order: Order) -> None:
        """Return nothing: the keys have to be computed."""
