"""Units of weights, blocks or channels, that compete with each other wherever shard edges cut them.

Nouns: the units of a parameter are numbered; a unit is *cut* on a rank that holds some of it and not all. Its *home*
(see ``cut_units``) puts its score together and enters it into the competition.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import ClassVar

import numpy as np
import torch
from typing_extensions import override

from distprune.collectives import sum_together
from distprune.patterns.base import Choice, Competing, Pattern, Ranked, Scope, Shares
from distprune.patterns.census import take_census
from distprune.patterns.cut_units import Inquiry, Question
from distprune.patterns.unit_sums import (
    NUM_COLUMNS,
    NUM_GONE,
    VALUES,
    BoolArray,
    IntArray,
    ShardUnits,
    UnitKeys,
    UnitLines,
    agree_on_scales,
    joined_tables,
    runs_of,
    sums_of,
    unit_order,
)
from distprune.scores import LocalScores, Score
from distprune.selection import Entry, MaskPut, Put, Selection
from distprune.shards import Geometry, LocalShard, Runs, fetched


class UnitPattern(Pattern):
    """The lowest ``sparsity`` of the units of all parameters (``scope="global"``), or of each (``"tensor"``).

    The score of a unit is the sum over its weights, or their largest or smallest, as the score says. A unit is gone if
    all its weights are.
    """

    sparsity: Shares
    scope: Scope
    what: ClassVar[str]  # in errors: what is counted

    @abstractmethod
    def num_units(self, shape: Sequence[int]) -> int:
        """Return how many units a parameter of the global ``shape`` has, all of one size."""

    @abstractmethod
    def lines_of(self, shard: LocalShard, size: int) -> UnitLines:
        """Return the units, of ``size`` weights each, of one of this rank's shards or of a piece of one.

        They follow from its layout alone.
        """

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census, one for the grid, and one of all units' scores where
        there are 16,381 at most, else those of ``select_lowest``.

        The grid takes 8 bytes a parameter; random scores need none. One more round counts the units that are left, if
        shares are of what is left and something is gone. Three more where ranks hold parts of units: sizes; 32 bytes
        for each cut unit and 8 for each home; and one byte a unit back.
        """
        comm, score, members = ranked.comm, ranked.score, ranked.roster.members
        ranked.order(range(len(members)))  # raises alike on all ranks
        own = _OwnUnits(ranked, self)
        gone_before, num_cut = take_census(
            ranked, counts_gone=ranked.of_left, num_cut=lambda scores: int(own.part(scores).lines.is_cut.sum())
        )
        if not score.scores_units:
            own.scales = agree_on_scales(ranked, own.sizes, together=self.scope == "global")
        if any(num_cut):
            own.ask()
        num_gone = [0] * len(members)
        if ranked.of_left and any(gone_before):
            num_left = sum_together(comm, (len(members),), own.count_left).tolist()
            num_gone = [num - left for num, left in zip(own.numels, num_left, strict=True)]

        order = unit_order(score)
        selection, keys = own.competing.select(
            self.sparsity, num_gone, lambda _: order, lambda: own.entries, self.what, tells=True
        )
        thresholds = [_threshold(key, scale, score) for key, scale in zip(keys, own.scales, strict=True)]
        stays = cache(lambda: own.stays(selection))
        answered: Callable[[], Sequence[BoolArray]] = list
        if any(num_cut):
            answered = own.inquiry.answer(lambda: own.answers(stays()))
        of_units = cache(lambda: own.joined(stays(), answered()))

        def decide(scores: LocalScores, put: Put) -> torch.Tensor:
            part, (ids, keep) = own.part(scores), of_units()[ranked.index[scores.shard.name]]
            return part.decide(keep[torch.from_numpy(np.searchsorted(ids, part.lines.ids))], put)

        return Choice(thresholds, decide)


class _OwnUnits:
    """The units of which this rank holds a part, and the cut ones that it decides. Its methods run within rounds."""

    def __init__(self, ranked: Ranked, pattern: UnitPattern) -> None:
        self._ranked, self._pattern = ranked, pattern
        self._parts: dict[int, ShardUnits] = {}  # by member
        self._lines: dict[object, UnitLines] = {}  # by layout
        self.numels = [pattern.num_units(member.global_shape) for member in ranked.roster.members]  # in units
        self.sizes = [numel // max(num, 1) for numel, num in zip(ranked.numels, self.numels, strict=True)]
        self.competing = Competing(ranked, pattern.scope, self.numels)
        self._firsts = list(itertools.accumulate(self.numels, initial=0))  # messages number all members' units
        self.scales: Sequence[int | None] = [None] * len(ranked.numels)  # random scores have none
        self.inquiry = Inquiry(ranked.comm)
        self._asked: list[IntArray] = []  # by rank: numbers, and rows of a table

    def part(self, scores: LocalScores) -> ShardUnits:
        """Return the units of ``scores``, of one of this rank's shards or of a piece of one."""
        member = self._ranked.index[scores.shard.name]
        if member not in self._parts:
            self._parts[member] = self._units_of(scores, member)
        part = self._parts[member]
        return part if part.scores is scores else self._units_of(scores, member)

    def _units_of(self, scores: LocalScores, member: int) -> ShardUnits:
        shard = scores.shard
        key = shard.geometry, shard.shape, shard.matrix, scores.device
        if key not in self._lines:
            self._lines[key] = self._pattern.lines_of(shard, self.sizes[member])
        return ShardUnits(scores, self._lines[key])

    @cached_property
    def _tables(self) -> dict[int, torch.Tensor]:
        tables = fetched([part.table(self.scales[member]) for member, part in self._parts.items()])
        return dict(zip(self._parts, tables, strict=True))

    def ask(self) -> None:
        """Tell the homes of cut units this rank's sums. Every rank must call it: two rounds."""

        def questions() -> list[Question]:
            ranks = self._ranked.comm.size
            return [part.question(self._firsts[i], self._tables[i], ranks) for i, part in self._parts.items()]

        messages = self.inquiry.ask(questions)
        self._asked = [np.frombuffer(message, np.int64).reshape(-1, 1 + NUM_COLUMNS) for message in messages]

    @cached_property
    def _decided(self) -> tuple[dict[int, tuple[IntArray, torch.Tensor]], IntArray]:
        """The cut units whose home is this rank: by member their ids, ascending, and their table.

        And the place among them of every unit that was asked about.
        """
        rows = np.concatenate([np.empty((0, 1 + NUM_COLUMNS), dtype=np.int64), *self._asked])
        ids, place = np.unique(rows[:, 0], return_inverse=True)
        table = joined_tables(self._ranked.score, len(ids), torch.from_numpy(place), torch.from_numpy(rows[:, 1:]))
        bounds = enumerate(itertools.pairwise(np.searchsorted(ids, self._firsts).tolist()))
        return {i: (ids[a:b] - self._firsts[i], table[a:b]) for i, (a, b) in bounds if a < b}, place

    def count_left(self, left: torch.Tensor) -> None:
        """Add the number of units in which something is left, by member."""
        for member, part in self._parts.items():
            if part.scores.shard.owned:
                left[member] += torch.count_nonzero(~self._is_gone(member, self._tables[member][part.lines.whole]))
        for member, (_, table) in self._decided[0].items():
            left[member] += torch.count_nonzero(~self._is_gone(member, table))

    @cached_property
    def entries(self) -> list[Entry]:
        """Return what competes: the whole units of each of this rank's shards, then the cut ones that it decides."""
        found = []
        for member, part in self._parts.items():
            whole = self._tables[member][part.lines.whole]
            ids, runs = part.lines.ids[part.lines.is_whole], part.lines.whole_runs
            found.append(self._entry(member, ids, whole, runs, owned=part.scores.shard.owned))
        decided = self._decided[0].items()
        found += [self._entry(member, ids, table, runs_of(ids), owned=True) for member, (ids, table) in decided]
        # Units without weights are nobody's, and gone: the first holder enters them.
        holders = zip(self._ranked.roster.first_holder, self.numels, self.sizes, strict=True)
        for member, (holder, num, size) in enumerate(holders):
            if num and not size and holder == self._ranked.comm.rank:
                table = torch.zeros((num, NUM_COLUMNS), dtype=torch.int64, device="cpu")
                found.append(self._entry(member, np.arange(num), table, ((0, num),), owned=True))
        return found

    def stays(self, selection: Selection) -> list[BoolArray]:
        """Return which units of each of :meth:`entries` stay."""
        entries = self.entries
        puts = [MaskPut.empty(entry.geometry.local_shape, entry.scores.device) for entry in entries]
        selection.decide(entries, puts)
        return [put.mask.numpy() for put in puts]

    def _entry(self, member: int, ids: IntArray, table: torch.Tensor, runs: Runs, *, owned: bool) -> Entry:
        name, score = self._ranked.roster.members[member].name, self._ranked.score
        values = score.of_units(name, torch.from_numpy(ids)) if score.scores_units else sums_of(table, score)
        is_gone = self._is_gone(member, table) & (not self._ranked.regrows)
        keys = UnitKeys(Geometry((self.numels[member],), (runs,)), values, is_gone)
        return self.competing.entry(member, keys, keys.geometry, owned=owned)

    def _is_gone(self, member: int, table: torch.Tensor) -> torch.Tensor:
        return table[:, NUM_GONE] == self.sizes[member]

    def answers(self, stays: Sequence[BoolArray]) -> list[list[bytes]]:
        """Return the answers to the ranks that asked this one."""
        of_cut = np.concatenate([np.empty(0, dtype=np.bool_), *stays[len(self._parts) :]])[self._decided[1]]
        ends = np.cumsum([len(rows) for rows in self._asked])
        return [[answer.tobytes()] for answer in np.split(of_cut, ends[:-1])]

    def joined(
        self, stays: Sequence[BoolArray], answered: Sequence[BoolArray]
    ) -> dict[int, tuple[IntArray, torch.Tensor]]:
        """Return by member the ids of this rank's units, and which of them stay."""
        found = {}
        for i, (member, part) in enumerate(self._parts.items()):
            keep = np.empty(len(part.lines.ids), dtype=np.bool_)
            keep[part.lines.is_whole] = stays[i]
            if answered:
                keep[part.lines.is_cut] = answered[i]
            found[member] = part.lines.ids, torch.from_numpy(keep)
        return found


def _threshold(key: float | int | None, scale: int | None, score: Score) -> float | int | None:
    """Return the score for which a key stands. A random key stands for itself."""
    if key is None or scale is None:
        return key
    if score.combined_by != "sum":
        return VALUES.value(int(key))
    order = unit_order(score)
    if key in (order.first, order.last):
        return math.copysign(math.inf, key)
    return math.ldexp(int(key), -scale)
