"""Units of weights, blocks or channels, that compete with each other wherever shard edges cut them.

Nouns: the units of a parameter are numbered; a unit is *cut* on a rank that holds some of it and not all. Its *home*
(see ``inquiry``) puts its score together and enters it into the competition.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import ClassVar

import numpy as np
import torch
from typing_extensions import override

from distprune.collectives import sum_together
from distprune.patterns.base import Choice, Competing, Pattern, Ranked, Scope, Shares
from distprune.patterns.census import take_census
from distprune.patterns.inquiry import Inquiry, Question
from distprune.patterns.unit_lines import BoolArray, IntArray, UnitLines
from distprune.patterns.unit_sums import (
    NUM_COLUMNS,
    NUM_GONE,
    VALUES,
    ShardUnits,
    UnitKeys,
    agree_on_scales,
    joined_tables,
    sums_of,
    unit_order,
)
from distprune.patterns.unstructured import choose_elements
from distprune.scores import LocalScores, Score
from distprune.selection import Entry, MaskPut, Order, Put, Selection
from distprune.shards import Geometry, LocalShard, Runs, batches, fetched, runs_of, sent, sent_together

_FETCHED = 1 << 24  # bytes of tables that a device holds, but for the last of them


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

    def numbers_weights(self, shard: LocalShard) -> bool:  # noqa: ARG002
        """Return whether units of one weight each are numbered as the weights of ``shard`` are."""
        return True

    @override
    def choose(self, ranked: Ranked) -> Choice:
        """Every rank must call it. Rounds: one for the census, one for the grid, and one of all units' scores where
        there are 16,381 at most, else those of ``select_lowest``.

        The grid takes 8 bytes a parameter; random scores need none. One more round counts the units that are left, if
        shares are of what is left and something is gone. Three more where ranks hold parts of units: sizes; 32 bytes
        for each cut unit and 8 for each home; and one byte a unit back. Units of one weight compete as weights do: then
        there is no grid, and temporaries do not grow with the units.
        """
        comm, score, members = ranked.comm, ranked.score, ranked.roster.members
        ranked.order(range(len(members)))  # raises alike on all ranks
        own = _OwnUnits(ranked, self)
        of_one_weight = {*own.sizes} == {1} and not score.descending
        gone_before, num_cut = take_census(
            ranked,
            counts_gone=ranked.of_left,
            num_cut=lambda scores: (
                not self.numbers_weights(scores.shard) if of_one_weight else own.lines_of(scores).num_cut
            ),
        )
        if of_one_weight and not any(num_cut):
            return choose_elements(ranked, self.sparsity, self.scope, gone_before, self.what, tells=True)
        if of_one_weight:
            num_cut = []  # none is
        if not score.scores_units:
            own.scales = agree_on_scales(ranked, own.sizes, lambda: own.parts, together=self.scope == "global")
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
        scales: Sequence[int | None] = own.scales or [None] * len(members)
        thresholds = [_threshold(key, scale, score, order) for key, scale in zip(keys, scales, strict=True)]
        stays = cache(lambda: own.stays(selection))
        answered: Callable[[], Sequence[BoolArray]] = list
        if any(num_cut):
            answered = own.inquiry.answer(lambda: own.answers(stays()))
        of_units = cache(lambda: own.joined(stays(), answered()))

        def decide(scores: LocalScores, put: Put) -> torch.Tensor:
            lines, (ids, keep) = own.lines_of(scores), of_units()[ranked.index[scores.shard.name]]
            there = torch.from_numpy(keep[np.searchsorted(ids, lines.ids)])
            return ShardUnits([scores], lines).decide(sent(there, scores.device), [put])[0]

        def decide_all(scores: Sequence[LocalScores], puts: Sequence[Put]) -> list[torch.Tensor]:
            put_of = {id(each): put for each, put in zip(scores, puts, strict=True)}
            found: dict[int, torch.Tensor] = {}
            of_device: dict[torch.device, list[ShardUnits]] = {}
            for part in own.parts:
                if all(id(each) in put_of for each in part.scores):
                    of_device.setdefault(part.scores[0].device, []).append(part)
            for device, parts in of_device.items():
                keeps = [
                    np.stack([of_units()[ranked.index[each.shard.name]][1] for each in part.scores]) for part in parts
                ]
                for part, keep in zip(parts, sent_together([*map(torch.from_numpy, keeps)], device), strict=True):
                    counts = part.decide(keep, [put_of[id(each)] for each in part.scores])
                    found.update(zip(map(id, part.scores), counts, strict=True))
            return [found[id(e)] if id(e) in found else decide(e, put) for e, put in zip(scores, puts, strict=True)]

        return Choice(thresholds, decide, decide_all)


class _OwnUnits:
    """The units of which this rank holds a part, and the cut ones that it decides. Its methods run within rounds."""

    def __init__(self, ranked: Ranked, pattern: UnitPattern) -> None:
        self._ranked, self._pattern = ranked, pattern
        self._lines: dict[object, UnitLines] = {}  # by layout
        self.numels = [pattern.num_units(member.global_shape) for member in ranked.roster.members]  # in units
        self.sizes = [numel // max(num, 1) for numel, num in zip(ranked.numels, self.numels, strict=True)]
        self.competing = Competing(ranked, pattern.scope, self.numels)
        self._firsts = list(itertools.accumulate(self.numels, initial=0))  # messages number all members' units
        self.scales: Sequence[int] = ()  # of each member's grid; random scores have none
        self.inquiry = Inquiry(ranked.comm)
        self._asked: list[IntArray] = []  # by rank: numbers, and rows of a table

    def lines_of(self, scores: LocalScores) -> UnitLines:
        """Return where the units of ``scores`` are, of one of this rank's shards or of a piece of one."""
        shard = scores.shard
        key = shard.geometry, shard.shape, shard.matrix, scores.device
        if key not in self._lines:
            self._lines[key] = self._pattern.lines_of(shard, self.sizes[self._ranked.index[shard.name]])
        return self._lines[key]

    @cached_property
    def parts(self) -> list[ShardUnits]:
        """The units of all of this rank's shards."""
        groups: dict[object, list[LocalScores]] = {}
        for i, scores in enumerate(self._ranked.scores):
            kind = ShardUnits.kind(scores)
            groups.setdefault(i if kind is None else (id(self.lines_of(scores)), kind), []).append(scores)
        UnitLines.send({id(lines): lines for lines in map(self.lines_of, self._ranked.scores)}.values())
        return [
            ShardUnits([of_kind[i] for i in which], self.lines_of(of_kind[0]))
            for of_kind in groups.values()
            for which in (batches(range(len(of_kind)), [*map(_numel, of_kind)]) if len(of_kind) > 1 else [[0]])
        ]

    @cached_property
    def _tables(self) -> list[torch.Tensor]:
        """Of each of the parts, (shards, units, NUM_COLUMNS)."""
        scales, index = self.scales, self._ranked.index
        found: list[torch.Tensor] = []
        there: list[torch.Tensor] = []
        for part in self.parts:
            there.append(part.table([scales[index[e.shard.name]] for e in part.scores] if scales else []))
            if sum(table.nbytes for table in there) > _FETCHED:
                found += fetched(there)
                there.clear()
        return found + fetched(there)

    def _of_members(self) -> Iterator[tuple[int, ShardUnits, int, torch.Tensor]]:
        """Yield each member, its part, its number there, and its table."""
        for part, tables in zip(self.parts, self._tables, strict=True):
            for i, (scores, table) in enumerate(zip(part.scores, tables, strict=True)):
                yield self._ranked.index[scores.shard.name], part, i, table

    def ask(self) -> None:
        """Tell the homes of cut units this rank's sums. Every rank must call it: two rounds."""

        def questions() -> list[Question]:
            ranks, firsts = self._ranked.comm.size, self._firsts
            return [part.question(i, firsts[member], table, ranks) for member, part, i, table in self._of_members()]

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
        for member, part, i, table in self._of_members():
            if part.scores[i].shard.owned:
                left[member] += torch.count_nonzero(~self._is_gone(member, table[part.lines.whole]))
        for member, (_, table) in self._decided[0].items():
            left[member] += torch.count_nonzero(~self._is_gone(member, table))

    @cached_property
    def entries(self) -> list[Entry]:
        """Return what competes: the whole units of each of this rank's shards, then the cut ones that it decides."""
        found = []
        for part, tables in zip(self.parts, self._tables, strict=True):
            members, lines = [self._ranked.index[scores.shard.name] for scores in part.scores], part.lines
            whole, ids, owned = tables[:, lines.whole], lines.ids[lines.is_whole], part.scores[0].shard.owned
            found += self._entries(members, ids, whole, lines.whole_runs, owned=owned)
        for member, (ids, table) in self._decided[0].items():
            found += self._entries([member], ids, table[None], runs_of(ids), owned=True)
        # Units without weights are nobody's, and gone: the first holder enters them.
        holders = zip(self._ranked.roster.first_holder, self.numels, self.sizes, strict=True)
        for member, (holder, num, size) in enumerate(holders):
            if num and not size and holder == self._ranked.comm.rank:
                table = torch.zeros((1, num, NUM_COLUMNS), dtype=torch.int64, device="cpu")
                found += self._entries([member], np.arange(num), table, ((0, num),), owned=True)
        return found

    def stays(self, selection: Selection) -> list[BoolArray]:
        """Return which units of each of :meth:`entries` stay."""
        entries = self.entries
        puts = [MaskPut.empty(entry.geometry.local_shape, entry.scores.device) for entry in entries]
        selection.decide(entries, puts)
        return [put.mask.numpy() for put in puts]

    def _entries(
        self, members: Sequence[int], ids: IntArray, tables: torch.Tensor, runs: Runs, *, owned: bool
    ) -> list[Entry]:
        """Return what ``members``, of as many units of equal sizes each, enter: those numbered ``ids``."""
        ranked, score = self._ranked, self._ranked.score
        if score.scores_units:
            units = torch.from_numpy(ids)
            values = torch.stack([score.of_units(ranked.roster.members[member].name, units) for member in members])
        else:
            values = sums_of(tables, score)
        is_gone = self._is_gone(members[0], tables) & (not ranked.regrows)
        geometry = Geometry((self.numels[members[0]],), (runs,))
        return [
            self.competing.entry(member, UnitKeys(of_member, gone), geometry, owned=owned)
            for member, of_member, gone in zip(members, values, is_gone, strict=True)
        ]

    def _is_gone(self, member: int, table: torch.Tensor) -> torch.Tensor:
        return table[..., NUM_GONE] == self.sizes[member]

    def answers(self, stays: Sequence[BoolArray]) -> list[list[bytes]]:
        """Return the answers to the ranks that asked this one."""
        num = sum(len(part.scores) for part in self.parts)
        of_cut = np.concatenate([np.empty(0, dtype=np.bool_), *stays[num:]])[self._decided[1]]
        ends = np.cumsum([len(rows) for rows in self._asked])
        return [[answer.tobytes()] for answer in np.split(of_cut, ends[:-1])]

    def joined(
        self, stays: Sequence[BoolArray], answered: Sequence[BoolArray]
    ) -> dict[int, tuple[IntArray, BoolArray]]:
        """Return by member the ids of this rank's units, and which of them stay."""
        found = {}
        for place, (member, part, _, _) in enumerate(self._of_members()):
            keep = np.empty(len(part.lines.ids), dtype=np.bool_)
            keep[part.lines.is_whole] = stays[place]
            if answered:
                keep[part.lines.is_cut] = answered[place]
            found[member] = part.lines.ids, keep
        return found


def _numel(scores: LocalScores) -> int:
    return scores.shard.geometry.local_numel


def _threshold(key: float | int | None, scale: int | None, score: Score, order: Order) -> float | int | None:
    """Return the score for which a key stands. A random key stands for itself."""
    if key is None or scale is None:
        return key
    if score.combined_by != "sum":
        return VALUES.values([int(key)])[0]
    if key in (order.first, order.last):
        return math.copysign(math.inf, key)
    return math.ldexp(int(key), -scale)
