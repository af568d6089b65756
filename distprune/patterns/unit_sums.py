"""The scores of blocks and channels, their *units*: sums of what their elements add, the same in any order.

They are on a grid common to all units that compete. A *table* has a row of int64 for each thing that is added up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives.agree import max_together
from distprune.patterns.base import Choice
from distprune.patterns.census import Competing
from distprune.patterns.local_units import BlockUnits, ChannelUnits, UnitBox
from distprune.scores.base import LocalScores, Score
from distprune.scores.exact_sum import grid_scale, summable
from distprune.selection.host import Source
from distprune.selection.order import Order
from distprune.selection.radix import Selection, raise_nans
from distprune.shards.device import chunk_size, count_true, fetched, on_host, sent
from distprune.shards.geometry import Geometry, runs_of

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

VALUES = Order("value", torch.float64)  # of extremes
SUMS = Order("value", torch.int64)  # of keys of units
# Rows of a table: of gone units the first is 0, of others more. Those of minus infinity count -1.
HAS_LEFT, SUM, NUM_INFINITE = 0, 1, 2


@dataclass(frozen=True)
class Grid:
    """``scales``: of every member's grid. ``is_odd``: some are summed up that are infinite. ``sizes``: of units."""

    scales: Sequence[int]
    sizes: Sequence[int]
    is_odd: bool


def empty_table(score: Score, num: int, grid: Grid | None, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the table of ``num`` units to which nothing was added yet. Without a ``grid`` it says what is gone."""
    num_rows = 1 if grid is None else 2 + grid.is_odd
    table = torch.zeros((num_rows, num), dtype=torch.int64, device=device)
    if score.combined_by != "sum":
        table[SUM:] = VALUES.first
    return table


def table_of(scores: LocalScores, units: BlockUnits | ChannelUnits, grid: Grid | None, member: int) -> torch.Tensor:
    """Return the table of the units of a shard, on its device. Local."""
    table = empty_table(scores.score, len(units.numbers), grid, scores.device)
    for piece in units.pieces(scores.device):
        part = table[:, piece.where]  # a view, or new
        _add(scores, part, piece, grid, member)
        if isinstance(piece.where, torch.Tensor):
            table[:, piece.where] = part
    return table


def _add(scores: LocalScores, table: torch.Tensor, piece: UnitBox, grid: Grid | None, member: int) -> None:
    """Add what the elements of ``piece`` have to the ``table`` of its units.

    Of extremes, SUM is the key of the largest value, or of the largest of the negative values.
    """
    score, gone = scores.score, scores.is_gone(piece.at)
    table[HAS_LEFT].add_(1 if gone is None else piece.sums(~gone))
    if grid is None:
        return
    values, signed = _addends(scores, piece.at, gone), score.ordered_by != "magnitude"
    values = values if signed else values.abs()
    if score.combined_by != "sum":
        keys = VALUES.keys(values.to(torch.float64) * (1.0 if score.combined_by == "max" else -1.0))
        torch.maximum(table[SUM], piece.largest(keys), out=table[SUM])
        return
    if grid.is_odd:
        infinite = values.isinf()
        table[NUM_INFINITE].add_(piece.sums(infinite * values.sign().to(torch.int64)))
        values = values.masked_fill(infinite, 0.0)
    table[SUM].add_(piece.sums(*summable(values, grid.scales[member], grid.sizes[member], signed=signed)))


def _addends(scores: LocalScores, at: slice, gone: torch.Tensor | None = None) -> torch.Tensor:
    """Return what elements add to their units, as floats that torch computes with. ``gone``: which are, if known."""
    values, score = scores.values(at), scores.score
    if not values.is_floating_point() or values.element_size() == 1:
        values = values.to(torch.float64)
    are_zeros = score.zero_where_weights_are and score.of_zero == 0 and scores.gone is scores.shard.local
    if are_zeros or scores.counts_gone or scores.regrows:
        return values
    gone = scores.is_gone(at) if gone is None else gone
    return values if gone is None else values.masked_fill(gone, score.of_zero)


def _largest(scores: LocalScores, *, is_odd: bool = False) -> torch.Tensor:
    """Return the largest size of an addend, NaN if one is, and 0; ``is_odd``: of a finite one, and how many are NaN."""
    numel, step = scores.shard.geometry.local_numel, chunk_size(scores.device)
    num_nans = torch.zeros((), dtype=torch.float64, device=scores.device)
    largest = [num_nans.clone()]
    for start in range(0, numel, step):
        values = _addends(scores, slice(start, min(start + step, numel)))
        if is_odd:
            num_nans += values.isnan().sum()
            values = values.nan_to_num(0.0, 0.0, 0.0)
        largest += torch.aminmax(values)
    return torch.stack([torch.stack(largest).abs().amax(), num_nans])


def agree_on_grid(competing: Competing) -> Grid:
    """Return the grid of every member, or of one for all that compete. Every rank must call it.

    One round of 8 bytes a parameter and 16 more.

    Raises:
        ValueError: on every rank: scores are NaN.
    """
    ranked, num_nans = competing.ranked, dict[str, int]()
    sizes = [numel // max(num, 1) for numel, num in zip(ranked.numels, competing.num_of, strict=True)]

    def fill(words: torch.Tensor) -> None:
        owned = [*ranked.owned.values()]
        found = [numbers.tolist() for numbers in fetched([*map(_largest, owned)])]
        odd = [i for i, (largest, _) in enumerate(found) if not math.isfinite(largest)]
        for i, numbers in zip(odd, fetched([_largest(owned[i], is_odd=True) for i in odd]), strict=True):
            found[i] = numbers.tolist()
            num_nans[owned[i].shard.name] = int(found[i][1])
        words.numpy()[[*ranked.owned]] = [largest for largest, _ in found]
        words[-1] = math.inf if any(num_nans.values()) else bool(odd)

    *largest, is_odd = max_together(ranked.comm, (len(sizes) + 1,), fill, torch.float64).tolist()
    if math.isinf(is_odd):
        raise_nans(ranked.comm, num_nans)
    if competing.scope == "global":
        scales = [grid_scale(max(sizes, default=0), max(largest, default=0.0))] * len(sizes)
    else:
        scales = [grid_scale(num, size) for num, size in zip(sizes, largest, strict=True)]
    return Grid(scales, sizes, is_odd > 0 and ranked.score.combined_by == "sum")


@dataclass(frozen=True, eq=False)
class Competitors:
    """Some units on the host: their numbers, ascending and counted over all members, their keys, and which are gone."""

    competing: Competing
    numbers: IntArray
    keys: torch.Tensor
    are_gone: torch.Tensor

    @staticmethod
    def of(competing: Competing, numbers: IntArray, table: torch.Tensor) -> Competitors:
        """Return the units of ``table``, which is used up.

        Keys are sums, negated if the score is ``descending``, or extremes. With more +inf than -inf a sum is +inf, and
        the reverse; with as many of both, it is that of the finite elements.
        """
        ranked, bounds = competing.ranked, np.searchsorted(numbers, competing.firsts)
        score = ranked.score
        if not score.scores_units:
            keys = table[SUM]
        else:
            keys = torch.empty(len(numbers), dtype=torch.int64, device="cpu")
            for i, (low, high) in enumerate(itertools.pairwise(bounds.tolist())):
                if low < high:
                    within = torch.from_numpy(numbers[low:high] - competing.firsts[i])
                    keys[low:high] = score.of_units(ranked.roster.members[i].name, within)
        if len(table) > NUM_INFINITE:
            keys.masked_fill_(table[NUM_INFINITE] > 0, SUMS.last).masked_fill_(table[NUM_INFINITE] < 0, SUMS.first)
        if score.descending or score.combined_by == "min":
            keys.neg_()
        are_gone = table[HAS_LEFT] == 0
        if not ranked.regrows:
            keys.masked_fill_(are_gone, SUMS.gone)
        return Competitors(competing, numbers, keys, are_gone)

    def those(self, which: BoolArray) -> Competitors:
        """Return some of them."""
        if which.all():
            return self
        at = torch.from_numpy(which)
        return Competitors(self.competing, self.numbers[which], self.keys[at], self.are_gone[at])

    def num_gone(self) -> torch.Tensor:
        """Return how many are gone, by member."""
        bounds = np.searchsorted(self.numbers, self.competing.firsts)
        return torch.stack([part.sum() for part in torch.split(self.are_gone, np.diff(bounds).tolist())])

    @cached_property
    def sources(self) -> list[Source]:
        """What they enter into each competition."""
        edges = [0, self.competing.firsts[-1]] if self.competing.scope == "global" else self.competing.firsts
        bounds, sources = np.searchsorted(self.numbers, edges).tolist(), []
        for i, (low, high) in enumerate(itertools.pairwise(bounds)):
            geometry = Geometry((edges[i + 1] - edges[i],), (runs_of(self.numbers[low:high] - edges[i]),))
            keys = partial(_in_chunks, self.keys[low:high])
            sources.append(Source("units", self.keys.device, keys, geometry, True, i, 0))
        return sources

    def stays(self, selection: Selection) -> torch.Tensor:
        """Return which of them stay, bool."""
        stays = torch.empty(len(self.numbers), dtype=torch.bool, device="cpu")
        nums = [source.geometry.local_numel for source in self.sources]
        for source, part in zip(self.sources, torch.split(stays, nums), strict=True):
            selection.decide(source, part)
        return stays


def _in_chunks(keys: torch.Tensor, _: Order) -> Iterator[Any]:
    for part in torch.split(keys, chunk_size(keys.device)):
        yield part.numpy() if on_host(keys.device) else part


def _thresholds(keys: list[float | int | None], score: Score, grid: Grid | None) -> list[float | int | None]:
    """Return by member the score for which each of ``keys`` of units stands. A random key stands for itself."""

    def score_of(key: int, scale: int) -> float:
        if score.combined_by != "sum":
            return VALUES.values([key])[0]
        return math.copysign(math.inf, key) if key in (SUMS.first, SUMS.last) else math.ldexp(key, -scale)

    if grid is None:
        return keys
    return [None if key is None else score_of(int(key), scale) for key, scale in zip(keys, grid.scales, strict=True)]


def choice_of_units(
    competing: Competing,
    selection: Selection,
    grid: Grid | None,
    units_of: Callable[[LocalScores], BlockUnits | ChannelUnits],
    numbers: IntArray,
    stays: Callable[[], torch.Tensor],
) -> Choice:
    """Return the choice, of which ``stays`` returns which of the units ``numbers`` stay, bool, on the CPU. Local.

    ``units_of`` returns the units of a shard, or of a piece of one.
    """
    stays_on = cache(lambda device: sent(stays(), device))

    def decide(scores: LocalScores, out: torch.Tensor) -> torch.Tensor:
        units = units_of(scores)
        own, before = units.numbers, competing.firsts[competing.ranked.index[scores.shard.name]]
        first, end = np.searchsorted(numbers, own[[0, -1]] + (before, before + 1)).tolist() if len(own) else (0, 0)
        own_stays = stays_on(out.device)[first:end]
        if end - first > len(own):  # there are others in between
            at = np.searchsorted(numbers[first:end], own + before)
            own_stays = own_stays[sent(torch.from_numpy(at), out.device)]
        counts = torch.zeros(3, dtype=torch.int64, device=out.device)
        for piece in units.pieces(out.device):
            piece.spread(own_stays[piece.where], out[piece.at])
            if not scores.regrows and (gone := scores.is_gone(piece.at)) is not None:
                torch.gt(out[piece.at], gone, out=out[piece.at])  # and not
                counts[1].add_(count_true(gone))
        counts[0] = len(out) - count_true(out)
        return counts

    return Choice(_thresholds(competing.by_member(selection.thresholds), competing.ranked.score, grid), decide)
