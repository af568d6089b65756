"""Blocks of weights that compete with each other: ``size`` x ``size`` of a matrix, numbered row-major."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np
import torch
from typing_extensions import override

from distprune.collectives.agree import sum_together
from distprune.patterns.addends import agree_on_grid, counts_of, thresholds_of
from distprune.patterns.base import Choice, Pattern, Ranked, Scope, Shares, check_share
from distprune.patterns.census import take_census
from distprune.patterns.own_blocks import OwnBlocks
from distprune.patterns.unstructured import choose_elements
from distprune.scores.base import LocalScores
from distprune.shards.matrix import Matrix


@final
@dataclass(frozen=True)
class Block(Pattern):
    """The lowest ``sparsity`` (a fraction, or a number) of the blocks of ``size`` x ``size`` weights.

    >>> layer = torch.nn.Linear(4, 4)
    >>> report = prune_model(layer, pattern=Block(2, 0.25))  # or 0.25, pattern="block:2"
    >>> report.num_pruned
    4

    The score of a block is the sum over its weights that are left. The blocks of all parameters compete
    (``scope="global"``), or those of each (``"tensor"``). A block is gone if all its weights are.

    Raises:
        TypeError: ``size`` is not an int, or ``sparsity`` not a number.
        ValueError: ``size`` is less than 1, or ``sparsity`` out of range.
    """

    size: int
    sparsity: Shares
    scope: Scope = "global"

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int):
            raise TypeError(f"size must be an int, not {self.size!r}")
        if self.size < 1:
            raise ValueError(f"size={self.size} is less than 1; a block has 1 x 1 weights or more")
        check_share(self.sparsity, scope=self.scope)

    @override
    def __str__(self) -> str:
        return f"block:{self.size}"

    @property
    @override
    def width(self) -> int:
        return self.size

    @override
    def unit(self, matrix: Matrix) -> tuple[int, int]:
        return self.size, self.size

    @override
    def regrowth(self, share: float) -> tuple[Pattern, Pattern]:
        return Block(self.size, share, "tensor"), Block(self.size, 0, "tensor")

    @override
    def check_fits(self, name: str, matrix: Matrix) -> None:
        if matrix.num_in % self.size or matrix.num_out % self.size:
            raise ValueError(
                f"blocks of {self.size} x {self.size} do not fit {name!r}: its {matrix.num_out} outputs and "
                f"{matrix.num_in} inputs must be multiples of {self.size}"
            )

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census, one for the grid, and those of ``select_lowest``.

        The grid takes 8 bytes a parameter; random scores need none. One more round counts the blocks that are left, if
        shares are of what is left and something is gone. Three more where shard edges cut blocks (see ``CutBands``): 24
        bytes for each cut block, 16 for each run of their numbers, and one bit a block back. Blocks of one weight
        compete as weights do: then there is no grid.

        Sums are kept: 9 bytes a block.
        """
        score, members = ranked.score, ranked.roster.members
        if score.combined_by != "sum":
            raise NotImplementedError(f"blocks are ranked by sums; {score!r} takes a {score.combined_by}imum")
        ranked.order(range(len(members)))  # raises alike on all ranks
        is_of_one = self.size == 1 and not score.descending
        blocks = OwnBlocks(ranked, self.size)
        # Weights that are kept transposed are numbered otherwise than their blocks.
        gone_before, num_cut = take_census(
            ranked,
            counts_gone=ranked.of_left,
            num_cut=lambda each: each.shard.as_matrix().transposed if is_of_one else len(blocks.of(each).cut),
        )
        if is_of_one and not any(num_cut):
            return choose_elements(ranked, self.sparsity, self.scope, gone_before, " (blocks)")
        if not score.scores_units:
            sizes = [self.size**2] * len(members)
            blocks.grid = agree_on_grid(ranked, sizes, lambda: blocks.addends, together=self.scope == "global")
        if any(num_cut):
            blocks.cut.bring(range(len(members)), blocks.cut_part)
        num_gone = [0] * len(members)
        if ranked.of_left and any(gone_before):
            num_gone = sum_together(ranked.comm, (len(members),), blocks.count_gone).tolist()
        choice = choose_elements(blocks.as_elements(), self.sparsity, self.scope, num_gone, " (blocks)")
        answers = blocks.cut.back(lambda: blocks.decide_cut(choice)) if any(num_cut) else {}
        stays_on = cache(lambda device: blocks.stays(choice, answers, device))

        def decide(scores: LocalScores, out: torch.Tensor) -> torch.Tensor:
            member, part = ranked.index[scores.shard.name], blocks.of(scores)
            own, stays = blocks.of(blocks.scores[member]), stays_on(out.device)[member]
            if part is not own:  # a piece of a shard, on the host
                lines = np.searchsorted(own.lines.numbers, part.lines.numbers)
                stays = stays[lines[:, None], np.searchsorted(own.columns.numbers, part.columns.numbers)]

            def written() -> Iterator[slice]:
                for at, bands in part.chunks(out.device):
                    part.spread(bands, stays, out[at])
                    yield at

            return counts_of(scores, out, written())

        return Choice(thresholds_of(choice, score, blocks.grid), decide)
