"""The sums of the scores of units' elements: the same in any order, on a grid common to all units that compete."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from distprune.collectives import max_together
from distprune.patterns.base import Ranked
from distprune.scores import LocalScores, Score, grid_scale, on_grid
from distprune.selection import Order, raise_nans
from distprune.shards import Geometry, fetched

__all__ = ["NUM_COLUMNS", "NUM_INFINITE", "NUM_LEFT", "SUM", "UnitKeys", "addends", "agree_on_scales", "unit_order"]

SUM, NUM_INFINITE, NUM_LEFT, NUM_COLUMNS = 0, 1, 2, 3  # of a table of units; those of minus infinity count -1


def unit_order(score: Score) -> Order:
    """Return the order in which the units of ``score`` compete."""
    return Order("value", score.dtype(torch.float32) if score.scores_units else torch.int64)


def addends(scores: LocalScores, at: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what the elements ``at`` add to their units, float64, and which of them are left (``None``: all)."""
    values, gone = scores.values(at).to(torch.float64), scores.is_gone(at)
    if scores.score.ordered_by == "magnitude":
        values = values.abs()
    if gone is not None and not scores.counts_gone:
        values = values.masked_fill(gone, scores.score.of_zero)
    return values, None if gone is None else ~gone


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
                values, _ = addends(of_shard, slice(start, stop))
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


def columns_of(values: torch.Tensor, left: torch.Tensor | None, scale: int) -> torch.Tensor:
    """Return what elements add to a table of units, (elements, NUM_COLUMNS), int64."""
    infinite = values.isinf()
    of_left = torch.ones_like(infinite) if left is None else left
    sums = on_grid(values.masked_fill(infinite, 0.0), scale)
    return torch.stack([sums, infinite * values.sign().to(torch.int64), of_left.to(torch.int64)], dim=1)


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

    def keys(self, order: Order, start: int, stop: int, out: torch.Tensor | None = None) -> torch.Tensor:  # noqa: ARG002
        return order.keys(self.values[start:stop]).masked_fill_(self.is_gone[start:stop], order.gone)

    def keys_at(self, order: Order, offsets: torch.Tensor) -> torch.Tensor:
        return order.keys(self.values[offsets]).masked_fill_(self.is_gone[offsets], order.gone)
