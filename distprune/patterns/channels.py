"""Channels that compete with each other: slices along one dim."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from typing_extensions import override

from distprune.collectives import max_together, sum_together
from distprune.patterns.base import Choice, Competing, Pattern, Ranked, Scope, Shares, check_share, num_lowest
from distprune.patterns.census import take_census
from distprune.patterns.unit_sums import (
    NUM_COLUMNS,
    NUM_GONE,
    ShardUnits,
    addends,
    agree_on_scales,
    sums_of,
    unit_order,
)
from distprune.scores import LocalScores
from distprune.selection import Order, Put, raise_nans
from distprune.shards import Geometry, Matrix, fetched, indices_of


@final
@dataclass(frozen=True)
class Channels(Pattern):
    """The lowest ``sparsity`` (a fraction, or a number) of the channels along ``dim``: slices of one index each.

    The score of a channel is the sum over its elements, or their largest or smallest, as the score says. The channels
    of each parameter compete (``scope="tensor"``), or those of all (``"global"``). A channel is gone if all its
    elements are.

    Raises:
        TypeError: ``dim`` is not an int, or ``sparsity`` not a number.
        ValueError: ``sparsity`` is out of range.
    """

    needs_matrix = False

    sparsity: Shares
    dim: int
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"dim must be an int, not {self.dim!r}")
        check_share(self.sparsity, scope=self.scope)

    @override
    def __str__(self) -> str:
        return f"channels:{self.dim}"

    @override
    def regrowth(self, share: float) -> tuple[Pattern, Pattern]:
        return Channels(share, self.dim), Channels(0, self.dim)

    @override
    def check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) <= 1:
            raise ValueError(
                "Structured pruning can only be applied to multidimensional tensors. "
                f"Found tensor of shape {tuple(shape)} with {len(shape)} dims"
            )
        if not -len(shape) <= self.dim < len(shape):
            raise IndexError(f"Invalid index {self.dim} for tensor of size {tuple(shape)}")

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census, and by the kind of score:

        sums take two, the grid (8 bytes a parameter) and the sums (24 bytes a channel); extremes take one (16 bytes a
        channel); random scores take none. Without sums, one more (24 bytes a channel) if some elements are gone.
        """
        members, score = ranked.roster.members, ranked.score
        nums = [member.global_shape[self.dim] for member in members]
        sizes = [numel // max(num, 1) for numel, num in zip(ranked.numels, nums, strict=True)]
        num_gone, _ = take_census(ranked, counts_gone=True)
        tables: Sequence[torch.Tensor] = []
        extremes: Callable[[], torch.Tensor] | None = None
        if score.combined_by == "sum" and not score.scores_units:
            scales = agree_on_scales(ranked, sizes, together=self.scope == "global")
            tables = self._sum(ranked, nums, scales)
        else:
            if any(num_gone):
                tables = self._sum(ranked, nums, [None] * len(members))
            if not score.scores_units:
                extremes = self._extremes(ranked, nums)

        @cache
        def stays() -> list[torch.Tensor]:
            if score.scores_units:
                every = [torch.arange(num, device="cpu") for num in nums]
                values = [score.of_units(each.name, own) for each, own in zip(members, every, strict=True)]
            elif extremes is not None:
                values = list(torch.split(extremes(), nums))
            else:
                values = [sums_of(table, score) for table in tables]
            keys = [unit_order(score).keys(of_member) for of_member in values]
            left = [table[:, NUM_GONE] < size for table, size in zip(tables, sizes, strict=False)]
            return self._keep(ranked, keys, left or [torch.ones_like(of, dtype=torch.bool) for of in keys])

        def decide(scores: LocalScores, put: Put) -> torch.Tensor:
            return _channels(scores, self.dim).decide(stays()[ranked.index[scores.shard.name]], put)

        return Choice([None] * len(members), decide)

    @override
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return 1, 1  # the sums of a channel are those over all ranks, wherever it is cut

    def _keep(self, ranked: Ranked, keys: list[torch.Tensor], left: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return which channels stay, by member. Of equal ones the first is pruned first. The same on every rank."""
        keep: list[torch.Tensor] = []
        for competing in Competing(ranked, self.scope, [len(of) for of in keys]).members:
            of_all, stays = torch.cat([keys[i] for i in competing]), torch.cat([left[i] for i in competing])
            names = [ranked.roster.members[i].name for i in competing]
            num_gone, of_left = int((~stays).sum()), ranked.of_left
            wanted = num_lowest(self.sparsity, names, len(stays), num_gone, " (channels)", of_left=of_left)
            stays |= ranked.regrows
            candidates = stays.nonzero().view(-1)
            wanted -= len(stays) - len(candidates)
            lowest = of_all[candidates].sort(stable=True).indices[: max(wanted, 0)]
            stays[candidates[lowest]] = False
            keep += torch.split(stays, [len(keys[i]) for i in competing])
        return keep

    def _sum(self, ranked: Ranked, num_channels: Sequence[int], scales: Sequence[int | None]) -> Sequence[torch.Tensor]:
        """Return by member the table of its channels over all ranks. Every rank must call it: one round."""

        def fill(total: torch.Tensor) -> None:
            tables = torch.split(total, list(num_channels))
            there = [_channels(scores, self.dim).table(scales[member]) for member, scores in ranked.owned.items()]
            for member, table in zip(ranked.owned, fetched(there), strict=True):
                tables[member].copy_(table)

        total = sum_together(ranked.comm, (sum(num_channels), NUM_COLUMNS), fill)
        return torch.split(total, list(num_channels))

    def _extremes(self, ranked: Ranked, num_channels: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Return a function of the largest, or smallest, of every channel's scores, as integers. One round."""
        sign = -1.0 if ranked.score.combined_by == "min" else 1.0  # both are found as a maximum
        num_nans: dict[str, int] = {}

        def fill(total: torch.Tensor) -> None:
            tables = torch.split(total.fill_(-torch.inf), list(num_channels))
            there = []
            for member, scores in ranked.owned.items():
                # The channels' extremes, and the number of NaNs.
                best = torch.full((num_channels[member] + 1,), -torch.inf, dtype=torch.float64, device=scores.device)
                best[-1] = 0.0
                there.append(best)
                for at, channels in _channels(scores, self.dim).chunks():
                    values = addends(scores, at)[0] * sign
                    is_nan = values.isnan()
                    best[-1] += is_nan.sum()
                    best[:-1].scatter_reduce_(0, channels, values.masked_fill_(is_nan, -torch.inf), "amax")
            for (member, scores), found in zip(ranked.owned.items(), fetched(there), strict=True):
                tables[member][:, 0] = found[:-1]
                tables[member][:, 1] = found[-1]
                num_nans[scores.shard.name] = int(found[-1])

        total = max_together(ranked.comm, (sum(num_channels), 2), fill, torch.float64)
        if max(total[:, 1].tolist(), default=0.0) > 0:
            raise_nans(ranked.comm, num_nans)
        return lambda: Order("value", torch.float64).keys(total[:, 0] * sign)


def _channels(scores: LocalScores, dim: int) -> ShardUnits:
    """Return the channels of a shard along ``dim``."""
    shape, geometry, first = scores.shard.shape, scores.shard.geometry, None
    if len(geometry.global_shape) < len(shape):  # flattened
        geometry, first = Geometry.whole(shape), 0
    channels = indices_of(geometry.dim_runs[dim])
    later = dim % len(shape) + 1
    before, after = math.prod(geometry.local_shape[: later - 1]), math.prod(geometry.local_shape[later:])
    if after == 1:  # a line is along the dim
        return ShardUnits(scores, shape[dim], channels.new_zeros(before), channels[None], first)
    return ShardUnits(scores, shape[dim], channels, channels.new_zeros(()).expand(before, after), first)
