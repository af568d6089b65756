"""Blocks of weights that compete with each other: ``size`` x ``size`` of a matrix, numbered row-major."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distprune.collectives.agree import sum_together
from distprune.hints import as_int
from distprune.patterns.base import Choice, Pattern, Ranked, Scope, Shares, check_share
from distprune.patterns.census import Competing, take_census
from distprune.patterns.cut_bands import Answers, CutBands, CutPart, unpacked
from distprune.patterns.local_units import BlockUnits
from distprune.patterns.unit_sums import (
    SUMS,
    Competitors,
    Grid,
    agree_on_grid,
    choice_of_units,
    empty_table,
    table_of,
)
from distprune.patterns.unstructured import choose_elements
from distprune.scores.base import LocalScores
from distprune.selection.radix import Selection, select_lowest
from distprune.shards.device import fetched
from distprune.shards.matrix import Matrix

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


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
        vars(self).update(size=as_int("size", self.size))
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
        shares are of what is left and something is gone. Three more where shard edges cut blocks (see ``CutBands``): 16
        bytes for each cut block, 24 if scores are infinite, 16 for each run of their numbers, and one bit a block back.
        Blocks of one weight compete as weights do: then there is no grid.

        Sums are kept: 34 bytes a block, and 8 more where scores are infinite.
        """
        score, members = ranked.score, ranked.roster.members
        if score.combined_by != "sum":
            raise NotImplementedError(f"blocks are ranked by sums; {score!r} takes a {score.combined_by}imum")
        ranked.order(range(len(members)))  # raises alike on all ranks
        is_of_one = self.size == 1 and not score.descending
        blocks = _LocalSums(ranked, self.size, self.scope)
        # Weights that are kept transposed are numbered otherwise than their blocks.
        gone_before, num_cut = take_census(
            ranked,
            counts_gone=ranked.of_left,
            num_cut=lambda each: each.shard.as_matrix().transposed if is_of_one else blocks.of(each).are_cut.sum(),
        )
        if is_of_one and not any(num_cut):
            return choose_elements(ranked, self.sparsity, self.scope, gone_before, " (blocks)")
        if not score.scores_units:
            blocks.grid = agree_on_grid(blocks.competing)
        if any(num_cut):
            blocks.cut.bring(range(len(members)), blocks.cut_part)
        num_gone = [0] * len(members)
        if ranked.of_left and any(gone_before):

            def count_gone(words: torch.Tensor) -> None:
                words += sum(units.num_gone() for units in blocks.competitors)

            num_gone = sum_together(ranked.comm, (len(members),), count_gone).tolist()
        competing = blocks.competing
        competitions = competing.competitions(self.sparsity, num_gone, lambda _: SUMS, " (blocks)")
        selection = select_lowest(
            ranked.comm, competitions, lambda: [source for units in blocks.competitors for source in units.sources]
        )
        answers = blocks.cut.back(lambda: blocks.decide_cut(selection)) if any(num_cut) else {}
        return choice_of_units(
            competing, selection, blocks.grid, blocks.of, blocks.here.numbers, lambda: blocks.stays(selection, answers)
        )


class _LocalSums:
    """The blocks of which this rank holds a part, and their sums. To be used within rounds.

    A block that shard edges cut is put together at its home, which enters it into the competition.
    """

    def __init__(self, ranked: Ranked, size: int, scope: Scope) -> None:
        self._ranked, self._size, self._made = ranked, size, cache(BlockUnits)
        self.competing = Competing(ranked, scope, [numel // size**2 for numel in ranked.numels])
        self.cut = CutBands(ranked.comm, ranked.roster)
        self.grid: Grid | None = None

    def of(self, scores: LocalScores) -> BlockUnits:
        """Return the blocks of one of this rank's shards, or of a piece of one."""
        return self._made(scores.shard.geometry, scores.shard.as_matrix(), self._size)

    @cached_property
    def _numbers(self) -> IntArray:
        """The blocks of which this rank holds a part, counted over all members."""
        return _joined([self.of(each).numbers + self.competing.firsts[i] for i, each in self._ranked.local.items()])

    @cached_property
    def _are_cut(self) -> BoolArray:
        return _joined([self.of(each).are_cut for each in self._ranked.local.values()], np.bool_)

    @cached_property
    def _table(self) -> torch.Tensor:
        """What this rank adds to these blocks."""
        tables = [table_of(each, self.of(each), self.grid, i) for i, each in self._ranked.local.items()]
        return torch.cat([empty_table(self._ranked.score, 0, self.grid), *fetched(tables)], 1)

    @cached_property
    def here(self) -> Competitors:
        """These blocks, by what this rank adds to them."""
        return Competitors.of(self.competing, self._numbers, self._table)

    @cached_property
    def _told(self) -> tuple[Competitors, list[IntArray]]:
        """The cut blocks whose home is here; and where among these those are of which each was told."""
        told = [(numbers + self.competing.firsts[i], values) for i, numbers, values in self.cut.told()]
        numbers, places = np.unique(_joined([numbers for numbers, _ in told]), return_inverse=True)
        parts = np.split(places, np.cumsum([len(numbers) for numbers, _ in told])[:-1]) if told else []
        table = empty_table(self._ranked.score, len(numbers), self.grid)
        for place, (_, values) in zip(parts, told, strict=True):
            if values is not None:
                table.index_add_(1, torch.from_numpy(place), torch.from_numpy(values.reshape(len(place), -1).T))
        return Competitors.of(self.competing, numbers, table), parts

    @cached_property
    def competitors(self) -> list[Competitors]:
        """The whole blocks that this rank owns, and the cut ones whose home it is."""
        owned = [np.full(len(self.of(each).numbers), each.shard.owned) for each in self._ranked.local.values()]
        return [self.here.those(_joined(owned, np.bool_) & ~self._are_cut), self._told[0]]

    def _cut_of(self, member: int) -> IntArray:
        """Return where the cut blocks of ``member`` are among those here."""
        low, high = np.searchsorted(self._numbers, self.competing.firsts[member : member + 2]).tolist()
        at: IntArray = np.flatnonzero(self._are_cut[low:high]) + low
        return at

    def cut_part(self, member: int) -> CutPart | None:
        """Return what this rank holds of the cut blocks of ``member``."""
        if not len(at := self._cut_of(member)):
            return None
        is_owned, numbers = self._ranked.local[member].shard.owned, self._numbers[at] - self.competing.firsts[member]
        sums = torch.stack([row[torch.from_numpy(at)] for row in self._table], 1) if is_owned else None
        return CutPart(self.competing.num_of[member], 1, numbers, sums)

    def decide_cut(self, selection: Selection) -> list[BoolArray]:
        """Return what stays of the cut blocks that ranks told this one of."""
        sums, parts = self._told
        stays = sums.stays(selection).numpy()
        return [stays[places] for places in parts]

    def stays(self, selection: Selection, answers: Mapping[int, Answers]) -> torch.Tensor:
        """Return which of the blocks stay of which this rank holds a part, bool."""
        stays = self.here.stays(selection)
        for member, of_member in answers.items():
            stays[torch.from_numpy(self._cut_of(member))] = torch.from_numpy(unpacked(of_member))
        return stays


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])
