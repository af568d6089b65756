"""Channels that compete with each other: slices along one dim. All ranks add up one table of them, and sort it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import final

import numpy as np
import torch
from typing_extensions import override

from distprune.collectives.agree import max_together, sum_together, together
from distprune.collectives.base import Communicator
from distprune.patterns.addends import (
    NUM_GONE,
    NUM_INFINITE,
    NUM_ROWS,
    SUM,
    VALUES,
    Grid,
    ShardAddends,
    agree_on_grid,
    keys_of,
    score_of,
    wrapped,
)
from distprune.patterns.base import Choice, Pattern, Ranked, Scope, Shares, check_share
from distprune.patterns.census import take_census
from distprune.patterns.competing import Competing, num_lowest
from distprune.scores.base import LocalScores
from distprune.shards.device import chunk_size, count_true, fetched, sent
from distprune.shards.geometry import Runs
from distprune.shards.local_shard import LocalShard
from distprune.shards.matrix import Matrix

Reduce = Callable[[Communicator, Sequence[int], Callable[[torch.Tensor], object]], torch.Tensor]

_WORDS = (1 << 17) - 1  # of a message of 1 MiB


@final
@dataclass(frozen=True)
class Channels(Pattern):
    """The lowest ``sparsity`` (a fraction, or a number) of the channels along ``dim``: slices of one index each.

    >>> layer = torch.nn.Linear(8, 4)
    >>> report = prune_model(layer, pattern=Channels(1, dim=0))  # one channel; Channels(0.25, dim=0): a quarter of them
    >>> report.num_pruned
    8

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
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return 1, 1  # the score of a channel is put together from all ranks, wherever it is cut

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census, one for the grid, one of 16 bytes a channel, or several
        of 1 MiB each, and one of 64 bytes.

        The grid takes 8 bytes a parameter; random scores need none. Infinite scores take 8 bytes a channel more,
        largest and smallest scores a round of their own. Every rank then knows the scores of all channels, and sorts
        them.
        """
        score, members = ranked.score, ranked.roster.members
        ranked.order(range(len(members)))  # raises alike on all ranks
        take_census(ranked)
        nums = [member.global_shape[self.dim] for member in members]
        sizes = [numel // max(num, 1) for numel, num in zip(ranked.numels, nums, strict=True)]
        firsts = list(itertools.accumulate(nums, initial=0))

        @cache
        def owned() -> dict[int, ShardAddends]:
            return {member: ShardAddends(scores) for member, scores in ranked.owned.items()}

        grid = None
        if not score.scores_units:
            grid = agree_on_grid(ranked, sizes, owned, together=self.scope == "global")

        @cache
        def own_table() -> torch.Tensor:
            """What this rank owns of the channels of all members."""
            table = torch.zeros((NUM_ROWS, firsts[-1]), dtype=torch.int64, device="cpu")
            if score.combined_by != "sum":
                table[SUM] = VALUES.first
            parts = fetched([self._table(part, grid, member) for member, part in owned().items()])
            for (member, part), of_part in zip(owned().items(), parts, strict=True):
                first = 0
                for start, stop in self._runs(part.scores.shard):
                    at = slice(firsts[member] + start, firsts[member] + stop)
                    table[:, at] = of_part[:, first : first + stop - start]
                    first += stop - start
            return table

        if grid is None:
            plan: list[tuple[Reduce, slice]] = [(sum_together, slice(NUM_GONE, NUM_GONE + 1))]
        elif score.combined_by == "sum":
            plan = [(sum_together, slice(SUM, NUM_ROWS if grid.is_odd else NUM_INFINITE))]
        else:
            plan = [(max_together, slice(SUM, SUM + 1)), (sum_together, slice(NUM_GONE, NUM_GONE + 1))]
        messages = []
        for reduce, rows in plan:
            num = rows.stop - rows.start
            for first in range(0, firsts[-1], _WORDS // num):
                at = rows, slice(first, min(first + _WORDS // num, firsts[-1]))
                shape = num, at[1].stop - first
                messages.append((at, reduce(ranked.comm, shape, partial(_fill, own_table, at))))

        with together(ranked.comm):
            gone = [np.empty(0, dtype=np.bool_)]
            for at, message in messages:
                own_table()[at] = message
            for member, size in enumerate(sizes):
                of_member = own_table()[:, firsts[member] : firsts[member + 1]]
                if score.scores_units:
                    numbers = torch.arange(nums[member], device="cpu")
                    of_member[SUM] = score.of_units(members[member].name, numbers)
                gone.append((of_member[NUM_GONE] == size).numpy())
                keys_of(of_member, score, size, gone_compete=ranked.regrows)
            keys, is_gone = own_table()[SUM].numpy(), np.concatenate(gone)
            stays = np.ones(len(keys), dtype=np.bool_)
            thresholds: list[float | int | None] = []
            for which in Competing(ranked, self.scope, nums).members:
                part = slice(firsts[which[0]], firsts[which[-1] + 1])
                num, num_gone = part.stop - part.start, int(np.count_nonzero(is_gone[part]))
                names = [members[member].name for member in which]
                before, num_gone = num_gone if ranked.of_left else 0, 0 if ranked.regrows else num_gone
                wanted = num_lowest(self.sparsity, names, num, before, " (channels)", of_left=ranked.of_left)
                order = np.argsort(keys[part], kind="stable")
                stays[part][order[: max(wanted, num_gone)]] = False
                last = int(keys[part][order[wanted - 1]]) if wanted > num_gone else None
                thresholds += [score_of(last, score, None if grid is None else grid.scales[member]) for member in which]

        @cache  # one for each device
        def stays_on(device: torch.device) -> torch.Tensor:
            return sent(torch.from_numpy(stays), device)

        def decide(scores: LocalScores, out: torch.Tensor) -> torch.Tensor:
            counts, first = (
                torch.zeros(3, dtype=torch.int64, device=out.device),
                firsts[ranked.index[scores.shard.name]],
            )
            runs = [stays_on(out.device)[first + low : first + high] for low, high in self._runs(scores.shard)]
            keep = torch.cat([out[:0], *runs])
            for at, channels, shape in self._pieces(scores.shard):
                out[at].view(shape).copy_(keep[channels, None].expand(shape))
                if not ranked.regrows and (gone := scores.is_gone(at)) is not None:
                    torch.gt(out[at], gone, out=out[at])  # and not
                    counts[1] += count_true(gone)
            counts[0] = len(out) - count_true(out)
            return counts

        return Choice(thresholds, decide)

    def _table(self, part: ShardAddends, grid: Grid | None, member: int) -> torch.Tensor:
        """Return what a shard's elements add to the channels that it holds a part of, on its device."""
        shard = part.scores.shard
        num = sum(stop - start for start, stop in self._runs(shard))
        table = torch.zeros((NUM_ROWS, num), dtype=torch.int64, device=shard.local.device)
        if part.scores.score.combined_by != "sum":
            table[SUM] = VALUES.first
        for at, channels, shape in self._pieces(shard):
            part.add(table[:, channels], at, partial(_added_up, shape), grid, member)
        return table

    def _runs(self, shard: LocalShard) -> Runs:
        """Return the channels of which a shard holds a part."""
        if len(shard.geometry.global_shape) < len(shard.shape):  # flattened
            return ((0, shard.shape[self.dim]),)
        return shard.geometry.dim_runs[self.dim]

    def _pieces(self, shard: LocalShard) -> Iterator[tuple[slice, slice, tuple[int, int, int]]]:
        """Yield local elements, their channels, by number among :meth:`_runs`, and their shape: (.., channels, ..)."""
        is_flat, geometry = len(shard.geometry.global_shape) < len(shard.shape), shard.geometry
        local_shape, dim = shard.shape if is_flat else geometry.local_shape, self.dim % len(shard.shape)
        num, after = local_shape[dim], math.prod(local_shape[dim + 1 :])
        passed, most = 0, chunk_size(shard.local.device)
        for place, stop in geometry.dim_runs[0] if is_flat else ((0, geometry.local_numel),):
            while place < stop:
                channel, within = divmod(place % (num * after), after)
                left = min(most, stop - place)
                if not channel and not within and left >= num * after:
                    shape = left // (num * after), num, after
                elif not within and left >= after:
                    shape = 1, min(num - channel, left // after), after
                else:
                    shape = 1, 1, min(after - within, left)
                numel = math.prod(shape)
                yield slice(passed, passed + numel), slice(channel, channel + shape[1]), shape
                place, passed = place + numel, passed + numel


def _fill(table: Callable[[], torch.Tensor], at: tuple[slice, slice], words: torch.Tensor) -> None:
    words.copy_(table()[at])


def _added_up(shape: tuple[int, int, int], values: torch.Tensor, offset: int | None) -> torch.Tensor:
    """Return the sums by channel of ``values``, each less ``offset``, int64, which wrap; ``None``: the largest."""
    found = values.view(shape)
    if offset is None:
        return found.amax((0, 2))
    for dim in (0, 2):  # the first before the last: by far the faster way
        found = found.sum(dim, keepdim=True) if shape[dim] > 1 else found
    return found.view(-1).to(torch.int64) - wrapped(offset * shape[0] * shape[2])
