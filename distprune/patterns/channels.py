"""Channels that compete with each other: slices along one dim. All ranks add up one table of them, and sort it."""

from __future__ import annotations

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
from distprune.collectives.communicator import Alone
from distprune.patterns.addends import (
    NUM_GONE,
    NUM_INFINITE,
    NUM_ROWS,
    SUM,
    SUMS,
    Competitors,
    Grid,
    add,
    agree_on_grid,
    counts_of,
    empty_table,
    thresholds_of,
    wrapped,
)
from distprune.patterns.base import Choice, Pattern, Ranked, Scope, Shares, check_share
from distprune.patterns.boxes import boxes
from distprune.patterns.census import Competing, take_census
from distprune.scores.base import LocalScores
from distprune.selection.radix import select_lowest
from distprune.shards.device import chunk_size, fetched, sent
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
        competing = Competing(ranked, self.scope, nums)
        firsts = competing.firsts

        grid = None if score.scores_units else agree_on_grid(ranked, sizes, together=self.scope == "global")

        @cache
        def own_table() -> torch.Tensor:
            """What this rank owns of the channels of all members."""
            table = empty_table(score, firsts[-1], grid)
            parts = fetched([self._table(scores, grid, member) for member, scores in ranked.owned.items()])
            for (member, scores), of_part in zip(ranked.owned.items(), parts, strict=True):
                first = 0
                for start, stop in self._runs(scores.shard):
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
                message = reduce(ranked.comm, shape, lambda words, at=at: words.copy_(own_table()[at]))  # type: ignore[misc]
                messages.append((at, message))

        with together(ranked.comm):
            table = own_table()
            for at, message in messages:
                table[at] = message
            channels = Competitors.of(competing, sizes, np.arange(firsts[-1]), table)
            num_gone = channels.num_gone().tolist() if ranked.of_left else [0] * len(nums)
            competitions = competing.competitions(self.sparsity, num_gone, lambda _: SUMS, " (channels)")
            selection = select_lowest(Alone(), competitions, lambda: channels.sources)
            stays = torch.from_numpy(channels.stays(selection))
        stays_on = cache(lambda device: sent(stays, device))

        def decide(scores: LocalScores, out: torch.Tensor) -> torch.Tensor:
            first, there = firsts[ranked.index[scores.shard.name]], stays_on(out.device)
            keep = torch.cat([there[first + low : first + high] for low, high in ((0, 0), *self._runs(scores.shard))])

            def written() -> Iterator[slice]:
                for at, which, shape in self._pieces(scores.shard):
                    out[at].view(shape).copy_(keep[which, None].expand(shape))
                    yield at

            return counts_of(scores, out, written())

        return Choice(thresholds_of(competing.by_member(selection.thresholds), score, grid), decide)

    def _table(self, scores: LocalScores, grid: Grid | None, member: int) -> torch.Tensor:
        """Return what a shard's elements add to the channels that it holds a part of, on its device."""
        num = sum(stop - start for start, stop in self._runs(scores.shard))
        table = empty_table(scores.score, num, grid, scores.device)
        for at, channels, shape in self._pieces(scores.shard):
            add(scores, table[:, channels], at, partial(_added_up, shape), grid, member)
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
        shape = math.prod(local_shape[:dim]), local_shape[dim], math.prod(local_shape[dim + 1 :])
        passed = 0
        for start, stop in geometry.dim_runs[0] if is_flat else ((0, geometry.local_numel),):
            for box in boxes(start, stop, shape, chunk_size(shard.local.device)):
                before, num, after = (high - low for low, high in box)
                at = slice(passed, passed + before * num * after)
                yield at, slice(*box[1]), (before, num, after)
                passed = at.stop


def _added_up(shape: tuple[int, int, int], values: torch.Tensor, offset: int | None) -> torch.Tensor:
    """Return the sums by channel of ``values``, each less ``offset``, int64, which wrap; ``None``: the largest."""
    found = values.view(shape)
    if offset is None:
        return found.amax((0, 2))
    for dim in (0, 2):  # the first before the last: by far the faster way
        found = found.sum(dim, keepdim=True) if shape[dim] > 1 else found
    return found.view(-1).to(torch.int64) - wrapped(offset * shape[0] * shape[2])
