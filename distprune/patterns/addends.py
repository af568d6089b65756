"""What elements add to the score of a block or a channel, their *unit*: sums that are the same in any order.

They are on a grid common to all units that compete. A *table* has a row of int64 for each thing that is added up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from distprune.collectives.agree import max_together
from distprune.patterns.base import Choice, Ranked
from distprune.scores.base import Elements, LocalScores, Score
from distprune.scores.exact_sum import grid_scale, summable
from distprune.selection.order import Order
from distprune.selection.radix import raise_nans
from distprune.shards.device import chunk_size, count_true, fetched
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, Ownership

VALUES = Order("value", torch.float64)  # of extremes
SUMS = Order("value", torch.int64)  # of keys of units
SUM, NUM_GONE, NUM_INFINITE, NUM_ROWS = 0, 1, 2, 3  # of a table; those of minus infinity count -1

# (what elements have, int64 or bool, and how much each has too much) -> sums by unit; instead of it None: the largest
AddUp = Callable[[torch.Tensor, int | None], torch.Tensor]


@dataclass(frozen=True)
class Grid:
    """``scales``: of every member's grid. ``is_odd``: some addends are infinite. ``sizes``: of units, by member."""

    scales: Sequence[int]
    sizes: Sequence[int]
    is_odd: bool


@dataclass(frozen=True)
class ShardAddends:
    """What the elements of one shard add to their units. No communication."""

    scores: LocalScores

    def gone(self, at: slice) -> torch.Tensor | None:
        return self.scores.is_gone(at)

    def values(self, at: slice, gone: torch.Tensor | None = None) -> torch.Tensor:
        """Return the scores that elements add, as floats that torch computes with. ``gone``: which are, if known."""
        values, score = self.scores.values(at), self.scores.score
        if not values.is_floating_point() or values.element_size() == 1:
            values = values.to(torch.float64)
        if self._fills_gone:
            gone = self.gone(at) if gone is None else gone
            values = values if gone is None else values.masked_fill(gone, score.of_zero)
        return values

    @cached_property
    def _fills_gone(self) -> bool:
        """Whether the scores of what is gone are not what it adds to its units."""
        scores, score = self.scores, self.scores.score
        if scores.counts_gone or scores.regrows:
            return False
        return not (score.zero_where_weights_are and score.of_zero == 0 and scores.gone is scores.shard.local)

    def add(self, table: torch.Tensor, at: slice, add_up: AddUp, grid: Grid | None, member: int) -> None:
        """Add what the elements ``at`` have to the rows of ``table``. Without a ``grid`` what is gone alone.

        Of extremes, SUM is the key of the largest value, or of the largest of the negative values.
        """
        score, gone = self.scores.score, self.gone(at)
        if gone is not None:
            table[NUM_GONE] += add_up(gone, 0)
        if grid is None:
            return
        values, signed = self.values(at, gone), score.ordered_by != "magnitude"
        values = values if signed else values.abs()
        if score.combined_by != "sum":
            keys = VALUES.keys(values.to(torch.float64) * (1.0 if score.combined_by == "max" else -1.0))
            torch.maximum(table[SUM], add_up(keys, None), out=table[SUM])
            return
        if grid.is_odd:
            infinite = values.isinf()
            table[NUM_INFINITE] += add_up(infinite * values.sign().to(torch.int64), 0)
            values = values.masked_fill(infinite, 0.0)
        table[SUM] += add_up(*summable(values, grid.scales[member], grid.sizes[member], signed=signed))

    def largest(self) -> torch.Tensor:
        """Return the largest size of what an element adds, float64: NaN if one is."""
        none = torch.zeros(1, dtype=torch.float64, device=self.scores.device)
        ends = [torch.stack(torch.aminmax(self.values(at))).to(torch.float64).abs() for at in self._chunks()]
        return torch.cat([none, *ends]).amax()

    def largest_finite(self) -> torch.Tensor:
        """Return the largest size of what is finite, and how many are NaN: float64."""
        found = torch.zeros(2, dtype=torch.float64, device=self.scores.device)
        for at in self._chunks():
            values = self.values(at)
            found[0] = torch.maximum(found[0], values.nan_to_num(0.0, 0.0, 0.0).abs_().amax())
            found[1] += values.isnan().sum()
        return found

    def _chunks(self) -> list[slice]:
        numel, step = self.scores.shard.geometry.local_numel, chunk_size(self.scores.device)
        return [slice(start, min(start + step, numel)) for start in range(0, numel, step)]


def agree_on_grid(
    ranked: Ranked, sizes: Sequence[int], parts: Callable[[], Mapping[int, ShardAddends]], *, together: bool
) -> Grid:
    """Return the grid of every member, or, ``together``, of one for all. Every rank must call it.

    ``sizes``: the elements of a unit, by member. ``parts``: by member what this rank owns. One round of 8 bytes a
    parameter and 8 more.

    Raises:
        ValueError: on every rank: scores are NaN.
    """
    num_nans: dict[str, int] = {}

    def fill(words: torch.Tensor) -> None:
        owned = parts()
        sizes = dict(zip(owned, map(float, fetched([part.largest() for part in owned.values()])), strict=True))
        odd = [member for member, size in sizes.items() if not math.isfinite(size)]
        for member, found in zip(odd, fetched([owned[member].largest_finite() for member in odd]), strict=True):
            sizes[member], num = found.tolist()
            words[-1] = 1.0
            if num:
                num_nans[ranked.roster.members[member].name] = int(num)
                words[-1] = math.inf
        for member, size in sizes.items():
            words[member] = size

    *largest, odd = max_together(ranked.comm, (len(sizes) + 1,), fill, torch.float64).tolist()
    if math.isinf(odd):
        raise_nans(ranked.comm, num_nans)
    if together:
        scales = [grid_scale(max(sizes, default=0), max(largest, default=0.0))] * len(sizes)
    else:
        scales = [grid_scale(num, size) for num, size in zip(sizes, largest, strict=True)]
    return Grid(scales, sizes, odd > 0)


def wrapped(number: int) -> int:
    """Return what an int64 holds of ``number``."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class _UnitScore(Score):
    """In the place of weights are the keys of units."""

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return elements.weight

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        return torch.int64


def competing(
    ranked: Ranked, member: int, keys: torch.Tensor, left: torch.Tensor, geometry: Geometry, *, owned: bool = True
) -> LocalScores:
    """Return units as elements of a coarser parameter, of which ``geometry`` says which they are. Local.

    ``keys``, ``left``: see :func:`keys_and_left`.
    """
    name = ranked.roster.members[member].name
    if ranked.score.scores_units:
        keys = ranked.score.of_units(name, geometry.flat_indices(0, geometry.local_numel)).to(torch.int64)
    shard = LocalShard(name, keys.view(geometry.local_shape), geometry, Ownership(owned))
    return LocalScores(shard, _UnitScore(), gone=left.view(geometry.local_shape), regrows=ranked.regrows)


def as_elements(ranked: Ranked, nums: Sequence[int], make_scores: Callable[[], Sequence[LocalScores]]) -> Ranked:
    """Return units as what a pattern of elements chooses from. ``nums``: of units, by member."""
    members = [
        dataclasses.replace(member, global_shape=(num,), dtype="torch.int64")
        for member, num in zip(ranked.roster.members, nums, strict=True)
    ]
    roster = dataclasses.replace(ranked.roster, members=tuple(members))
    how: dict[str, Any] = {"score": _UnitScore(), "make_scores": make_scores, "checks": False, "regrows": False}
    return dataclasses.replace(ranked, roster=roster, **how)


def empty_table(score: Score, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the table of units of ``shape`` without elements."""
    table = torch.zeros((NUM_ROWS, *shape), dtype=torch.int64, device=device)
    if score.combined_by != "sum":
        table[SUM] = VALUES.first
    return table


def keys_and_left(table: torch.Tensor, score: Score, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys by which units of ``size`` elements compete, int64, and which are not gone, given their table.

    Keys are sums, negated if the score is ``descending``, or extremes. With more +inf than -inf a sum is +inf, and the
    reverse; with as many of both, it is that of the finite elements. The table is consumed.
    """
    keys = table[SUM]
    if score.combined_by == "sum":
        keys.masked_fill_(table[NUM_INFINITE] > 0, SUMS.last).masked_fill_(table[NUM_INFINITE] < 0, SUMS.first)
    keys = keys.neg_() if score.descending or score.combined_by == "min" else keys
    return keys, table[NUM_GONE] != size


def thresholds_of(choice: Choice, score: Score, grid: Grid | None) -> list[float | int | None]:
    """Return the score for which each threshold among units stands. A random key stands for itself."""
    if grid is None:
        return choice.thresholds
    found: list[float | int | None] = []
    for key, scale in zip(choice.thresholds, grid.scales, strict=True):
        if key is None:
            found.append(None)
        elif score.combined_by != "sum":
            found += VALUES.values([int(key)])
        else:
            is_infinite = key in (SUMS.first, SUMS.last)
            found.append(math.copysign(math.inf, key) if is_infinite else math.ldexp(int(key), -scale))
    return found


def counts_of(scores: LocalScores, out: torch.Tensor, written: Iterable[slice]) -> torch.Tensor:
    """Write that what is gone goes into ``out``, as ranges of it are ``written``; return the counts of ``Choice``."""
    counts = torch.zeros(3, dtype=torch.int64, device=out.device)
    for at in written:
        if not scores.regrows and (gone := scores.is_gone(at)) is not None:
            torch.gt(out[at], gone, out=out[at])  # and not
            counts[1] += count_true(gone)
    counts[0] = len(out) - count_true(out)
    return counts
