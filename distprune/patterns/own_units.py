"""The units of which a rank holds a part, and the cut ones whose home it is.

The tables of few units are held whole. Of shards with many, sums are made whenever they are read (see ``large_units``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

import numpy as np
import torch

from distprune.patterns.base import Competing, Ranked, Scope
from distprune.patterns.inquiry import Inquiry, Question
from distprune.patterns.large_units import LargeUnits, Rim, Window, as_kept
from distprune.patterns.unit_lines import BoolArray, IntArray, UnitLines
from distprune.patterns.unit_sums import (
    NUM_COLUMNS,
    NUM_GONE,
    Addends,
    ShardUnits,
    UnitKeys,
    joined_tables,
    sums_of,
    unit_order,
)
from distprune.scores.base import LocalScores
from distprune.selection.host import Source
from distprune.selection.radix import Selection
from distprune.shards.device import batches, fetched, sent
from distprune.shards.geometry import Geometry, Runs, runs_of
from distprune.shards.local_shard import LocalShard

_TABLES = 1 << 18  # units of all shards whose tables are held, those of the fewest first: 60 bytes each
_KEYS = 1 << 21  # units of which keys are held: no sample is drawn of so few, so that they are read in each round
_FEW = 1 << 12  # units of one shard: their table is held in any case
_FETCHED = 1 << 24  # bytes of tables that a device holds, but for the last of them


class OwnUnits:
    """The units of which this rank holds a part, and the cut ones that it decides. Its methods run within rounds.

    ``num_units``, ``lines_of``, ``side``: those of the pattern.
    """

    def __init__(
        self,
        ranked: Ranked,
        scope: Scope,
        num_units: Callable[[Sequence[int]], int],
        lines_of: Callable[[LocalShard, int], UnitLines],
        side: int | None,
    ) -> None:
        self._ranked, self._make_lines, self._side = ranked, lines_of, side
        self._lines: dict[object, UnitLines] = {}  # by layout
        self.numels = [num_units(member.global_shape) for member in ranked.roster.members]  # in units
        self.sizes = [numel // max(num, 1) for numel, num in zip(ranked.numels, self.numels, strict=True)]
        self.competing = Competing(ranked, scope, self.numels)
        self._firsts = list(itertools.accumulate(self.numels, initial=0))  # messages number all members' units
        self.scales: Sequence[int] = ()  # of each member's grid; random scores have none
        self.inquiry = Inquiry(ranked.comm)
        self._asked: list[IntArray] = []  # by rank: numbers, and rows of a table
        self._asks: list[tuple[int, IntArray]] = []  # by question: the member, and numbers

    def lines_of(self, scores: LocalScores) -> UnitLines:
        """Return where the units of ``scores`` are, of one of this rank's shards or of a piece of one."""
        return self._lines_of(self._member(scores), scores.shard)

    def _lines_of(self, member: int, shard: LocalShard) -> UnitLines:
        key = shard.geometry, shard.shape, shard.matrix, shard.local.device
        if key not in self._lines:
            self._lines[key] = self._make_lines(shard, self.sizes[member])
        return self._lines[key]

    def _member(self, scores: LocalScores) -> int:
        return self._ranked.index[scores.shard.name]

    @cached_property
    def _large(self) -> dict[int, list[LargeUnits | Rim]]:
        """The parts of this rank's shards whose tables are not held, by member."""
        nums = {
            self._member(each): _numel(each) // max(self.sizes[self._member(each)], 1) for each in self._ranked.scores
        }
        passed = dict(zip(sorted(nums, key=nums.__getitem__), itertools.accumulate(sorted(nums.values())), strict=True))
        self._has_keys = {member for member, num in passed.items() if num <= _KEYS}
        return {
            member: self._split(scores)
            for scores in (self._ranked.scores if self._side else ())
            if nums[member := self._member(scores)] > _FEW and passed[member] > _TABLES
        }

    def _split(self, scores: LocalScores) -> list[LargeUnits | Rim]:
        """Return the parts of ``scores``, of a shard whose tables are not held or of a piece of one."""
        assert self._side is not None
        member, found = self._member(scores), list[LargeUnits | Rim]()
        for begin, part, is_rim in as_kept(scores, self._side):
            if is_rim:
                found.append(Rim(begin, ShardUnits([part], self._make_lines(part.shard, self.sizes[member]))))
            else:
                how = partial(self._lines_of, member), partial(self._scales, [member]), partial(self._keys, [member])
                found.append(LargeUnits(part, begin, self._side, *how))
        return found

    def is_large(self, scores: LocalScores) -> bool:
        """Return whether ``scores`` are of a shard whose tables are not held, or of a piece of one."""
        return self._member(scores) in self._large

    def num_cut(self, scores: LocalScores) -> int:
        """Return how many units of ``scores``, of one of this rank's shards, are cut."""
        if self.is_large(scores):
            return sum(part.num_cut for part in self._large[self._member(scores)])
        return self.lines_of(scores).num_cut

    @cached_property
    def parts(self) -> list[ShardUnits]:
        """The units of all of this rank's shards whose tables are held, and of rims."""
        rims = [part.units for parts in self._large.values() for part in parts if isinstance(part, Rim)]
        held = [scores for scores in self._ranked.scores if not self.is_large(scores)]
        groups: dict[object, list[LocalScores]] = {}
        for i, scores in enumerate(held):
            kind = ShardUnits.kind(scores)
            groups.setdefault(i if kind is None else (id(self.lines_of(scores)), kind), []).append(scores)
        all_lines = [*map(self.lines_of, held), *(units.lines for units in rims)]
        UnitLines.send({id(lines): lines for lines in all_lines}.values())
        return rims + [
            ShardUnits([of_kind[i] for i in which], self.lines_of(of_kind[0]))
            for of_kind in groups.values()
            for which in (batches(range(len(of_kind)), [*map(_numel, of_kind)]) if len(of_kind) > 1 else [[0]])
        ]

    @cached_property
    def _others(self) -> list[tuple[int, LargeUnits]]:
        """The other units, each with their member."""
        return [(i, part) for i, parts in self._large.items() for part in parts if isinstance(part, LargeUnits)]

    @property
    def addends(self) -> list[Addends]:
        """The elements of all of this rank's shards."""
        return [*self.parts, *(part for _, part in self._others)]

    @cached_property
    def _tables(self) -> list[torch.Tensor]:
        """Of each of the parts, (shards, units, NUM_COLUMNS)."""
        index = self._ranked.index
        found: list[torch.Tensor] = []
        there: list[torch.Tensor] = []
        for part in self.parts:
            there.append(part.table(self._scales([index[each.shard.name] for each in part.scores])))
            if sum(table.nbytes for table in there) > _FETCHED:
                found += fetched(there)
                there.clear()
        return found + fetched(there)

    def _scales(self, members: Sequence[int]) -> list[int]:
        return [self.scales[member] for member in members] if self.scales else []

    def _of_members(self) -> Iterator[tuple[int, ShardUnits, int, torch.Tensor]]:
        """Yield each member, its part, its number there, and its table."""
        for part, tables in zip(self.parts, self._tables, strict=True):
            for i, (scores, table) in enumerate(zip(part.scores, tables, strict=True)):
                yield self._ranked.index[scores.shard.name], part, i, table

    def ask(self) -> None:
        """Tell the homes of cut units this rank's sums. Every rank must call it: two rounds."""

        def questions() -> list[Question]:
            asks = [(member, part, i, table[part.lines.cut]) for member, part, i, table in self._of_members()]
            windows = [
                (member, window.units)
                for member, part in self._others
                for window in (part.windows() if part.num_cut else ())
                if window.units.lines.num_cut
            ]
            of_cut = fetched([units.table(self._scales([i]))[0, units.lines.cut_there] for i, units in windows])
            asks += [(member, units, 0, table) for (member, units), table in zip(windows, of_cut, strict=True)]
            self._asks = [(member, part.cut_ids) for member, part, _, _ in asks]
            ranks, firsts = self._ranked.comm.size, self._firsts
            return [part.question(i, firsts[member], table, ranks) for member, part, i, table in asks]

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
        others = [(i, window) for i, part in self._others if part.owned for window in part.windows()]
        nums = [
            (~self._is_gone(i, window.units.table([])[0, window.units.lines.whole_there])).sum() for i, window in others
        ]
        for (member, _), num in zip(others, fetched(nums), strict=True):
            left[member] += num

    @cached_property
    def entries(self) -> list[Source]:
        """Return what competes: the whole units of each of this rank's shards, then the cut ones that it decides."""
        found = []
        for part, tables in zip(self.parts, self._tables, strict=True):
            members, lines = [self._ranked.index[scores.shard.name] for scores in part.scores], part.lines
            whole, ids, owned = tables[:, lines.whole], lines.ids[lines.is_whole], part.scores[0].shard.owned
            found += self._entries(members, ids, whole, lines.whole_runs, part, owned=owned)
        for member, (ids, table) in self._decided[0].items():
            found += self._entries([member], ids, table[None], runs_of(ids), None, owned=True)
        # Units without weights are nobody's, and gone: the first holder enters them.
        holders = zip(self._ranked.roster.first_holder, self.numels, self.sizes, strict=True)
        for member, (holder, num, size) in enumerate(holders):
            if num and not size and holder == self._ranked.comm.rank:
                table = torch.zeros((1, num, NUM_COLUMNS), dtype=torch.int64, device="cpu")
                found += self._entries([member], np.arange(num), table, ((0, num),), None, owned=True)
        return found

    def stays(self, selection: Selection) -> list[BoolArray]:
        """Return which units of each of :meth:`entries` stay."""
        entries = self.entries
        outs = [torch.empty(e.geometry.local_numel, dtype=torch.bool, device=e.scores.device) for e in entries]
        selection.decide(entries, outs)
        return [out.numpy() for out in outs]

    def large_entries(self) -> list[Source]:
        """Return what competes of the whole units whose tables are not held."""
        for member, part in self._others:
            if member in self._has_keys:
                part.hold(unit_order(self._ranked.score))
        return [self.competing.source(i, part, part.geometry, owned=part.owned) for i, part in self._others]

    def _entries(
        self,
        members: Sequence[int],
        ids: IntArray,
        tables: torch.Tensor,
        runs: Runs,
        part: Addends | None,
        *,
        owned: bool,
    ) -> list[Source]:
        """Return what ``members``, of as many units of equal sizes each, enter: those numbered ``ids``."""
        geometry = Geometry((self.numels[members[0]],), (runs,))
        return [
            self.competing.source(member, keys, geometry, owned=owned)
            for member, keys in zip(
                members, self._keys(members, tables, lambda: torch.from_numpy(ids), part), strict=True
            )
        ]

    def _keys(
        self, members: Sequence[int], tables: torch.Tensor, numbers: Callable[[], torch.Tensor], part: Addends | None
    ) -> list[UnitKeys]:
        """Return units of ``members``, each with the same ``numbers``, as they compete, given their tables."""
        ranked, score = self._ranked, self._ranked.score
        if score.scores_units:
            units, names = numbers(), [ranked.roster.members[member].name for member in members]
            values = sent(torch.stack([score.of_units(name, units) for name in names]), tables.device)
        else:
            values = sums_of(tables, score, may_be_odd=part is None or len(part.odd_chunks) > 0)
        is_gone = self._is_gone(members[0], tables) & (not ranked.regrows)
        return [*map(UnitKeys, values, is_gone)]

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
                keep[part.lines.cut] = answered[place]
            found[member] = part.lines.ids, keep
        return found

    def joined_cut(self, answered: Sequence[BoolArray]) -> dict[int, tuple[IntArray, BoolArray]]:
        """Return by member the numbers of this rank's cut units, ascending, and which of them stay."""
        found = {}
        for member in self._large:
            mine = [place for place, (other, _) in enumerate(self._asks) if other == member]
            ids = np.concatenate([np.empty(0, dtype=np.int64), *(self._asks[place][1] for place in mine)])
            keep = np.concatenate([np.empty(0, dtype=np.bool_), *(answered[place] for place in mine)])
            order = np.argsort(ids)
            found[member] = ids[order], keep[order]
        return found

    def decide_large(
        self,
        scores: LocalScores,
        out: torch.Tensor,
        selection: Selection,
        of_cut: Callable[[], dict[int, tuple[IntArray, BoolArray]]],
    ) -> torch.Tensor:
        """Decide a shard whose tables are not held, or a piece of one, window by window: see ``Choice.decide``."""
        member = self._member(scores)
        parts = self._large[member]
        if not any(scores is own for own in self._ranked.scores):
            odd_chunks = [number for part in parts for number in part.addends.odd_chunks]
            parts = self._split(scores)
            for part in parts:
                part.addends.odd_chunks = odd_chunks
        counts = torch.zeros(3, dtype=torch.int64, device=scores.device)
        for window in (window for part in parts for window in part.windows()):
            lines, num = window.units.lines, len(window.units.lines.ids)
            keep = torch.empty(num, dtype=torch.bool, device=scores.device)
            keep[lines.whole_there] = self._stays(member, window, selection)
            if lines.num_cut:
                ids, stays = of_cut()[member]
                answers = torch.from_numpy(stays[np.searchsorted(ids, window.units.cut_ids)])
                keep[lines.cut_there] = sent(answers, scores.device)
            counts += window.units.decide(keep[None], [out[window.begin :]])[0]
        return counts

    def _stays(self, member: int, window: Window, selection: Selection) -> torch.Tensor:
        """Return which of the whole units of ``window`` stay."""
        units, order = window.units, unit_order(self._ranked.score)
        if (keys := window.keys) is None:
            table = units.table(self._scales([member]))[:, units.lines.whole_there]
            (own,) = self._keys([member], table, lambda: torch.from_numpy(units.whole_ids), units)
            keys = own.all_keys(order)
        competition, first = self.competing.place(member)
        geometry = Geometry((self.numels[member],), (units.lines.whole_runs,))
        return selection.stays(keys, competition, geometry, first + units.shift)


def _numel(scores: LocalScores) -> int:
    return scores.shard.geometry.local_numel
