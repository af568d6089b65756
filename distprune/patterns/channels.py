"""Channels that compete with each other: slices along one dim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from distprune.collectives import max_together, sum_together
from distprune.patterns.base import Choice, Pattern, Ranked, Scope, check_share, num_lowest
from distprune.patterns.census import take_census
from distprune.patterns.units import NUM_COLUMNS, NUM_LEFT, addends, agree_on_scales, columns_of, sums_of, unit_order
from distprune.scores import LocalScores
from distprune.selection import Chosen, Order, raise_nans
from distprune.shards import chunk_size, fetched, sent

__all__ = ["Channels"]


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

    sparsity: int | float
    dim: int
    scope: Scope = "tensor"

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"dim must be an int, not {self.dim!r}")
        check_share(self.sparsity)

    @override
    def __str__(self) -> str:
        return f"channels:{self.dim}"

    @property
    @override
    def needs_matrix(self) -> bool:
        return False

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
        num_channels = [member.global_shape[self.dim] for member in members]
        census = take_census(ranked.comm, ranked.roster, lambda: ranked.scores, counts_gone=True)
        tables: list[torch.Tensor] | None = None  # nothing is gone
        extremes: torch.Tensor | None = None
        is_sum = score.combined_by == "sum" and not score.scores_units
        sign = -1.0 if score.combined_by == "min" else 1.0  # both extremes are found as a maximum
        if is_sum:
            sizes = [math.prod(m.global_shape) // max(n, 1) for m, n in zip(members, num_channels, strict=True)]
            scales = agree_on_scales(ranked, lambda: _owned(ranked), sizes, together=self.scope == "global")
            tables = self._sum(ranked, num_channels, scales)
        else:
            if any(census.num_gone):
                tables = self._sum(ranked, num_channels, None)
            if not score.scores_units:
                extremes = self._extremes(ranked, num_channels, sign)

        def settle() -> list[Chosen]:
            if is_sum:
                values = [sums_of(table, score) for table in tables or ()]
            elif score.scores_units:
                values = [score.of_units(m.name, torch.arange(n)) for m, n in zip(members, num_channels, strict=True)]
            else:
                assert extremes is not None
                bits = Order("value", torch.float64)
                values = [bits.keys(each) for each in torch.split(extremes * sign, num_channels)]
            keys = [unit_order(score).keys(of_member) for of_member in values]
            left = [of_member[:, NUM_LEFT] > 0 for of_member in tables or ()]
            keep = self._keep(ranked, keys, left or [torch.ones_like(of, dtype=torch.bool) for of in keys])
            found = [self._spread(scores, keep[ranked.place[scores.shard.name]]) for scores in ranked.scores]
            return Chosen.all_of([mask for mask, _ in found], [counts for _, counts in found])

        return Choice([None] * len(members), settle)

    def _keep(self, ranked: Ranked, keys: list[torch.Tensor], left: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return which channels stay, by member. Of equal ones the first is pruned first. The same on every rank."""
        keep: list[torch.Tensor] = []
        for competing in [range(len(keys))] if self.scope == "global" and keys else [[i] for i in range(len(keys))]:
            of_all, stays = torch.cat([keys[i] for i in competing]), torch.cat([left[i] for i in competing])
            first = repr(ranked.roster.members[competing[0]].name)
            where = f"{'all parameters together' if self.scope == 'global' else first} (channels)"
            candidates = stays.nonzero().view(-1)
            num_gone = len(stays) - len(candidates)
            wanted = num_lowest(self.sparsity, len(stays), num_gone, where, of_left=ranked.of_left)
            lowest = of_all[candidates].sort(stable=True).indices[: max(wanted - num_gone, 0)]
            stays[candidates[lowest]] = False
            keep += torch.split(stays, [len(keys[i]) for i in competing])
        return keep

    def _sum(self, ranked: Ranked, num_channels: Sequence[int], scales: Sequence[int] | None) -> list[torch.Tensor]:
        """Return by member the sums of its channels over all ranks. Every rank must call it: one round.

        Without ``scales`` it only counts what is left.
        """

        def fill(total: torch.Tensor) -> None:
            tables = torch.split(total, list(num_channels))
            there = []
            for member, scores in _owned(ranked).items():
                there.append(torch.zeros_like(tables[member], device=scores.device))
                for at, channels, shape in _slices(scores, self.dim):
                    if scales is None:
                        gone = scores.is_gone(at)
                        left = torch.ones(at.stop - at.start, device=scores.device) if gone is None else ~gone
                        columns = left.to(torch.int64)[:, None].expand(-1, NUM_COLUMNS)
                    else:
                        columns = columns_of(*addends(scores, at), scales[member])
                    if shape is not None:
                        others = [dim for dim in range(len(shape)) if dim != self.dim % len(shape)]
                        columns = columns.view(*shape, NUM_COLUMNS).sum(others)
                    there[-1].index_add_(0, channels, columns)
            for member, table in zip(_owned(ranked), fetched(there), strict=True):
                tables[member].copy_(table)

        total = sum_together(ranked.comm, (sum(num_channels), NUM_COLUMNS), fill)
        return list(torch.split(total, list(num_channels)))

    def _extremes(self, ranked: Ranked, num_channels: Sequence[int], sign: float) -> torch.Tensor:
        """Return the largest of every channel's scores times ``sign``, float64: one round."""
        num_nans: dict[str, int] = {}

        def fill(total: torch.Tensor) -> None:
            tables = torch.split(total.fill_(-torch.inf), list(num_channels))
            there = []
            for member, scores in _owned(ranked).items():
                best = torch.full((2, num_channels[member]), -torch.inf, dtype=torch.float64, device=scores.device)
                there.append(best)
                for at, channels, shape in _slices(scores, self.dim):
                    values, _ = addends(scores, at)
                    is_nan = values.isnan()
                    pair = torch.stack([(values * sign).masked_fill(is_nan, -torch.inf), is_nan.to(torch.float64)])
                    if shape is not None:
                        others = [dim + 1 for dim in range(len(shape)) if dim != self.dim % len(shape)]
                        pair = pair.view(2, *shape).amax(others)
                    best.scatter_reduce_(1, channels.expand(2, -1), pair, "amax")
            for (member, scores), found in zip(_owned(ranked).items(), fetched(there), strict=True):
                tables[member].copy_(found.t())
                num_nans[scores.shard.name] = int((found[1] > 0).sum())

        total = max_together(ranked.comm, (sum(num_channels), 2), fill, torch.float64)
        if max(total[:, 1].tolist(), default=0.0) > 0:
            raise_nans(ranked.comm, num_nans)
        return total[:, 0]

    def _spread(self, scores: LocalScores, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what becomes of the elements, given which channels stay: the mask, and how many are gone and go."""
        mask = torch.empty(scores.shard.geometry.local_shape, dtype=torch.bool, device=scores.device)
        stays, counts = sent(keep, scores.device), torch.zeros(2, dtype=torch.int64, device=scores.device)
        for at, channels, shape in _slices(scores, self.dim):
            chunk = mask.view(-1)[at]
            if shape is None:
                chunk.copy_(stays[channels])
            else:
                along = [-1 if dim == self.dim % len(shape) else 1 for dim in range(len(shape))]
                chunk.view(shape).copy_(stays[channels].view(along))
            gone = scores.is_gone(at)
            if gone is not None:
                chunk.logical_and_(~gone)
                counts[0] += gone.sum()
            counts[1] += (~chunk).sum()
        return mask, counts


def _owned(ranked: Ranked) -> dict[int, LocalScores]:
    return {ranked.place[scores.shard.name]: scores for scores in ranked.scores if scores.shard.owned}


def _slices(scores: LocalScores, dim: int) -> Iterator[tuple[slice, torch.Tensor, tuple[int, ...] | None]]:
    """Yield (local elements, channels, their shape).

    ``channels`` are the indices along ``dim``; without a shape (``None``) they are those of each element.
    """
    shard, device = scores.shard, scores.device
    shape, geometry = shard.geometry.local_shape, shard.geometry
    if shard.geometry.local_numel == 0:
        return
    num_dims, row = len(shard.shape), shard.geometry.local_numel // shape[0]
    if len(shape) != num_dims or row > 4 * chunk_size(device):  # flattened, or too long to be taken by rows
        stride = math.prod(shard.shape[dim % num_dims + 1 :])
        for start, stop in scores.chunks():
            flat = geometry.flat_indices(start, stop, device)
            yield slice(start, stop), flat // stride % shard.shape[dim], None
        return
    runs = geometry.dim_runs[dim]
    channels = torch.cat([torch.arange(start, stop, device=device) for start, stop in runs])
    step = max(1, chunk_size(device) // max(row, 1))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        here = channels[start:stop] if dim % num_dims == 0 else channels
        yield slice(start * row, stop * row), here, (stop - start, *shape[1:])
