"""Channels that compete with each other: slices along one dim. All ranks add up one table of them, and sort it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import final

import numpy as np
import torch
from typing_extensions import override

from distprune.collectives.agree import max_together, sum_together, together
from distprune.collectives.communicator import Alone
from distprune.hints import as_int
from distprune.patterns.base import Choice, Pattern, Ranked, Scope, Shares, check_share
from distprune.patterns.census import Competing, take_census
from distprune.patterns.local_units import ChannelUnits
from distprune.patterns.unit_sums import (
    SUMS,
    Competitors,
    agree_on_grid,
    choice_of_units,
    empty_table,
    table_of,
)
from distprune.scores.base import LocalScores
from distprune.selection.radix import select_lowest
from distprune.shards.device import fetched
from distprune.shards.matrix import Matrix

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
        vars(self).update(dim=as_int("dim", self.dim))
        check_share(self.sparsity, scope=self.scope)

    @override
    def __str__(self) -> str:
        return f"channels:{self.dim}"

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

        The grid takes 8 bytes a parameter; random scores need none. Infinite scores that are summed up take 8
        bytes a channel more. Every rank then knows the scores of all channels, and sorts them.
        """
        score, members = ranked.score, ranked.roster.members
        ranked.order(range(len(members)))  # raises alike on all ranks
        take_census(ranked)
        nums = [member.global_shape[self.dim] for member in members]
        competing, made = Competing(ranked, self.scope, nums), cache(ChannelUnits)
        firsts = competing.firsts
        grid = None if score.scores_units else agree_on_grid(competing)

        def units_of(scores: LocalScores) -> ChannelUnits:
            return made(scores.shard.geometry, scores.shard.shape, self.dim)

        @cache
        def own_table() -> torch.Tensor:
            """What this rank owns of the channels of all members."""
            table = empty_table(score, firsts[-1], grid)
            parts = fetched([table_of(scores, units_of(scores), grid, i) for i, scores in ranked.owned.items()])
            for (i, scores), part in zip(ranked.owned.items(), parts, strict=True):
                table[:, torch.from_numpy(firsts[i] + units_of(scores).numbers)] = part
            return table

        num_words, messages = (1 if grid is None else 2 + grid.is_odd) * firsts[-1], list[torch.Tensor]()
        reduce = sum_together if score.combined_by == "sum" else max_together
        for first in range(0, num_words or 1, _WORDS):
            at = slice(first, min(first + _WORDS, num_words))
            told = partial(lambda at, words: words.copy_(own_table().view(-1)[at]), at)
            messages.append(reduce(ranked.comm, (at.stop - first,), told))

        with together(ranked.comm):
            table = torch.cat(messages).view(own_table().shape)
            channels = Competitors.of(competing, np.arange(firsts[-1]), table)
            num_gone = channels.num_gone().tolist() if ranked.of_left else [0] * len(nums)
            competitions = competing.competitions(self.sparsity, num_gone, lambda _: SUMS, " (channels)")
            selection = select_lowest(Alone(), competitions, lambda: channels.sources)
            stays = channels.stays(selection)
        return choice_of_units(competing, selection, grid, units_of, channels.numbers, lambda: stays)
