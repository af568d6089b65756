"""Units on a shard: blocks or channels, which are pruned as a whole.

The sums of their elements' scores are the same in any order, on a grid common to all units that compete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from distprune.collectives.agree import max_together
from distprune.patterns.base import Ranked
from distprune.patterns.inquiry import Question
from distprune.patterns.unit_lines import IntArray, Tile, UnitLines
from distprune.scores.base import LocalScores, Score
from distprune.scores.exact_sum import grid_scale, summable
from distprune.selection.order import Order
from distprune.selection.radix import raise_nans
from distprune.shards.device import count_true, fetched, is_small, on_host

VALUES = Order("value", torch.float64)  # of extremes
SUM, NUM_INFINITE, NUM_GONE, NUM_COLUMNS = 0, 1, 2, 3  # of a table of units; those of minus infinity count -1


def unit_order(score: Score) -> Order:
    """Return the order in which the units of ``score`` compete."""
    return Order("value", score.dtype(torch.float32) if score.scores_units else torch.int64)


class Addends:
    """What the elements of shards that are laid out alike add to their units. No communication.

    ``scores``: of one shard, or of several small ones on the host (see :meth:`kind`), whose elements are read together.
    ``odd_chunks``: the numbers of those in which an addend is infinite, or NaN; :func:`agree_on_scales` finds them.
    """

    def __init__(self, scores: Sequence[LocalScores]) -> None:
        self.scores = scores
        self._first, self.owned = scores[0], scores[0].shard.owned
        self._device = self._first.device
        self.odd_chunks: Sequence[int] = ()

    @staticmethod
    def kind(scores: LocalScores) -> object:
        """Return what shards that are laid out alike have in common if they are read together; ``None``: none are."""
        numel = scores.shard.geometry.local_numel
        return (scores.shard.local.dtype, scores.shard.owned) if numel and is_small(numel, scores.device) else None

    def empty_table(self, num: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the table of ``num`` units without elements, column by column in memory."""
        table = torch.zeros((NUM_COLUMNS, num), dtype=torch.int64, device=device).t()
        if self._first.score.combined_by != "sum":
            table[:, SUM] = VALUES.first
        return table

    def sums(
        self, tiles: Iterable[tuple[slice | torch.Tensor, Tile]], num_units: int, size: int, scales: Sequence[int]
    ) -> torch.Tensor:
        """Return what ``tiles`` of all shards add up to, (shards, ``num_units``, NUM_COLUMNS).

        ``size``: of a unit, in elements. ``scales``: by shard; without them only what is gone is there. Of extremes,
        SUM is the key of the largest value, or of the largest of the negative values.
        """
        num, sign = len(self.scores), _sign(self._first.score)
        table = self.empty_table(num * num_units, self._device)
        for at, units in tiles:
            gone = self._gone(at)
            if scales and sign is not None:
                units.take_largest(table[:, SUM], VALUES.keys(self._addends(at, gone).to(torch.float64) * sign))
            elif scales:
                values = self._addends(at, gone).view(num, -1)
                if self.odd_chunks:
                    infinite = values.isinf()
                    units.add(table[:, NUM_INFINITE], infinite * values.sign().to(torch.int64))
                    values = values.masked_fill(infinite, 0.0)
                signed = self._first.score.ordered_by != "magnitude"
                units.add(table[:, SUM], *summable(values, scales, size, signed=signed))
            if gone is not None:
                units.add(table[:, NUM_GONE], gone)
        return table.view(num, num_units, NUM_COLUMNS)

    def largest(self) -> torch.Tensor:
        """Return the largest size of an addend, (chunks, shards) float64: NaN where one is."""
        num, chunks = len(self.scores), [*self._first.chunks()]
        found = torch.zeros((max(1, len(chunks)), num), dtype=torch.float64, device=self._device)
        for of_chunk, (start, stop) in zip(found, chunks, strict=bool(chunks)):
            own = self._filled(slice(start, stop))
            ends = torch.stack(torch.aminmax(own) if num == 1 else torch.aminmax(own.view(num, -1), dim=1))
            of_chunk.copy_(ends.view(2, -1).to(torch.float64).abs().amax(0))  # a NaN is both ends
        return found

    def largest_of_odd(self) -> torch.Tensor:
        """Return of each shard the largest size of a finite addend in odd chunks, and how many are NaN: float64."""
        found = torch.zeros((len(self.scores), 2), dtype=torch.float64, device=self._device)
        chunks = [*self._first.chunks()]
        for i in self.odd_chunks:
            values = self._filled(slice(*chunks[i])).view(len(self.scores), -1)
            found[:, 1] += values.isnan().sum(1)
            largest = values.nan_to_num(0.0, 0.0, 0.0).abs_().amax(1).to(torch.float64)
            torch.maximum(found[:, 0], largest, out=found[:, 0])
        return found

    def _values(self, at: slice | torch.Tensor) -> torch.Tensor:
        """Return the scores ``at``, of one shard after the other."""
        if len(self.scores) == 1:
            return self._first.values(at)
        return self._first.joined_values([(each, at) for each in self.scores])

    def _gone(self, at: slice | torch.Tensor) -> torch.Tensor | None:
        if len(self.scores) == 1:
            return self._first.is_gone(at)
        return self._first.joined_gone([(each, at) for each in self.scores])

    @cached_property
    def _fills_gone(self) -> bool:
        """Whether the scores of what is gone are not what it adds to its units."""
        first = self._first
        if first.counts_gone or first.regrows:
            return False
        are_zero = first.score.zero_where_weights_are and first.score.of_zero == 0
        return not (are_zero and all(each.gone is each.shard.local for each in self.scores))

    def _filled(self, at: slice | torch.Tensor, gone: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scores ``at``, where what is gone has those that it adds: floats that torch computes with."""
        values = self._values(at)
        if not values.is_floating_point() or values.element_size() == 1:
            values = values.to(torch.float64)
        if self._fills_gone:
            gone = self._gone(at) if gone is None else gone
            values = values if gone is None else values.masked_fill(gone, self._first.score.of_zero)
        return values

    def _addends(self, at: slice | torch.Tensor, gone: torch.Tensor | None) -> torch.Tensor:
        """Return what the elements ``at`` add to their units, given which are ``gone`` (``None``: none)."""
        values = self._filled(at, gone)
        return values.abs() if self._first.score.ordered_by == "magnitude" else values


class ShardUnits(Addends):
    """The units of shards that are laid out alike. ``shift``: what their numbers are more than those of ``lines``."""

    def __init__(self, scores: Sequence[LocalScores], lines: UnitLines, shift: int = 0) -> None:
        super().__init__(scores)
        self.lines, self.shift = lines, shift

    @property
    def cut_ids(self) -> IntArray:
        """The numbers of the cut units."""
        return self.lines.ids[self.lines.cut] + self.shift

    @property
    def whole_ids(self) -> IntArray:
        """The numbers of the whole units."""
        return self.lines.ids[self.lines.is_whole] + self.shift

    def table(self, scales: Sequence[int]) -> torch.Tensor:
        """Return what the local units add up to: see :meth:`sums`."""
        return self.sums(self._tiles(), len(self.lines.ids), self.lines.size, scales)

    def decide(self, keep: torch.Tensor, outs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Write what stays of the elements into ``outs``, given which units stay, (shards, units), on their device.

        Return of each shard the counts of ``Choice.decide``, 0 NaNs.
        """
        num, stays = len(self.scores), keep.view(-1)
        counts = torch.zeros((num, 3), dtype=torch.int64, device=self._device)
        for at, units in self._tiles():
            numel = at.stop - at.start
            flags = outs[0][at] if num == 1 else torch.empty(num * numel, dtype=torch.bool, device=self._device)
            units.spread(stays, flags)
            if not self._first.regrows and (gone := self._gone(at)) is not None:
                torch.gt(flags, gone, out=flags)  # and not
                counts[:, 1] += gone.view(num, -1).sum(1)
            counts[:, 0] += numel - (count_true(flags) if num == 1 else flags.view(num, -1).sum(1))
            if num > 1:
                for out, own in zip(outs, torch.split(flags, numel), strict=True):
                    out[at] = own
        return counts.unbind()

    def question(self, i: int, first: int, of_cut: torch.Tensor, num_ranks: int) -> Question:
        """Return what the homes of the cut units of shard ``i`` are told, and asked: of what this rank owns, scores.

        ``of_cut``: their table, on the host.
        """
        ids = self.cut_ids
        told = of_cut if self.scores[i].shard.owned else self.empty_table(len(ids))
        rows = np.column_stack([first + ids, told.numpy()])
        return Question(self.lines.homes(ids, num_ranks), lambda places: rows[places].tobytes())

    def _tiles(self) -> Iterable[tuple[slice, Tile]]:
        """Return local elements, and the units of those of all shards."""
        num = len(self.scores)
        if num == 1:
            return self.lines.tiles()
        return ((at, tile.repeated(num, len(self.lines.ids))) for at, tile in self.lines.tiles())


def agree_on_scales(
    ranked: Ranked, num_addends: Sequence[int], parts: Callable[[], Sequence[Addends]], *, together: bool
) -> list[int]:
    """Return the scale of every member's grid, or, ``together``, of one grid for all. Every rank must call it.

    ``num_addends``: the elements of a unit, by member. ``parts``: all shards of this rank. One round of 8 bytes a
    parameter.

    Raises:
        ValueError: on every rank: scores are NaN.
    """
    num_nans: dict[str, int] = {}

    def fill(largest: torch.Tensor) -> None:
        found = fetched([part.largest() for part in parts()])
        for part, of_chunks in zip(parts(), found, strict=True):
            part.odd_chunks = np.flatnonzero(~of_chunks.isfinite().all(1).numpy()).tolist()
            if part.scores[0].shard.owned:
                for scores, size in zip(part.scores, of_chunks.nan_to_num(0.0, 0.0).amax(0).tolist(), strict=True):
                    i = ranked.index[scores.shard.name]
                    largest[i] = max(size, float(largest[i]))
        odd = [part for part in parts() if part.odd_chunks and part.scores[0].shard.owned]
        for part, of_odd in zip(odd, fetched([part.largest_of_odd() for part in odd]) if odd else (), strict=True):
            for scores, (size, nans) in zip(part.scores, of_odd.tolist(), strict=True):
                i = ranked.index[scores.shard.name]
                largest[i] = torch.inf if nans else max(size, float(largest[i]))
                if nans:
                    num_nans[scores.shard.name] = num_nans.get(scores.shard.name, 0) + int(nans)

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


def sums_of(table: torch.Tensor, score: Score, *, may_be_odd: bool = True) -> torch.Tensor:
    """Return the keys of units, int64: the sums of their elements, negated if the score is ``descending``; or extremes.

    ``may_be_odd``: some may have infinite elements.
    With more +inf than -inf the sum is +inf, and the reverse; with as many of both, the sum of the finite elements.
    """
    order = unit_order(score)
    if score.combined_by != "sum":
        return table[..., SUM] if score.combined_by == "max" else -table[..., SUM]
    sums = table[..., SUM]
    if may_be_odd:
        sums = sums.masked_fill(table[..., NUM_INFINITE] > 0, order.last)
        sums = sums.masked_fill(table[..., NUM_INFINITE] < 0, order.first)
    return -sums if score.descending else sums


@dataclass(frozen=True)
class UnitKeys:
    """The units of one member on this rank, as they compete. See ``selection/host.py``."""

    values: torch.Tensor  # what they are ranked by
    is_gone: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.values.device

    def keys(self, order: Order, memory: Any = None) -> Iterator[Any]:  # noqa: ARG002
        keys = self.all_keys(order)
        yield keys.numpy() if on_host(self.device) else keys

    def all_keys(self, order: Order) -> torch.Tensor:
        """Return all keys: new."""
        return order.keys(self.values).masked_fill_(self.is_gone, order.gone)
