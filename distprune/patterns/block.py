"""Blocks of weights that compete with each other, wherever shard edges cut them.

Nouns: a *block* is ``size`` x ``size`` weights of a matrix; blocks are numbered row-major. A block is *cut* on a rank
that holds some of it and not all. Its *home* (see ``cut_units``) adds up its score and enters it into the competition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distprune.collectives import sum_together
from distprune.patterns.base import Choice, Competing, Pattern, Ranked, Scope, Shares, check_share
from distprune.patterns.census import take_census
from distprune.patterns.cut_units import Inquiry, Question, home_of
from distprune.patterns.unit_sums import (
    NUM_COLUMNS,
    NUM_GONE,
    IntArray,
    ShardUnits,
    UnitKeys,
    agree_on_scales,
    sums_of,
    unit_order,
)
from distprune.scores import LocalScores, Score
from distprune.selection import Entry, MaskPut, Put, Selection
from distprune.shards import Geometry, LocalMatrix, Matrix, fetched

BoolArray = npt.NDArray[np.bool_]


@final
@dataclass(frozen=True)
class Block(Pattern):
    """The lowest ``sparsity`` (a fraction, or a number) of the blocks of ``size`` x ``size`` weights.

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
        shares are of what is left and something is gone. Three more where ranks hold parts of blocks: sizes; 32 bytes
        for each cut block and 8 for each home; and one byte a block back.
        """
        comm, score, members = ranked.comm, ranked.score, ranked.roster.members
        if score.combined_by != "sum":
            raise NotImplementedError(f"blocks are ranked by sums; {score!r} takes a {score.combined_by}imum")
        ranked.order(range(len(members)))  # raises alike on all ranks
        own = _OwnBlocks(ranked, self.size, self.scope)
        gone_before, num_cut = take_census(
            ranked, counts_gone=ranked.of_left, num_cut=lambda scores: int(own.part(scores).is_cut.sum())
        )
        if not score.scores_units:
            sizes, is_global = [self.size**2] * len(members), self.scope == "global"
            own.scales = agree_on_scales(ranked, sizes, together=is_global)
        if any(num_cut):
            own.ask()
        num_gone = [0] * len(members)
        if ranked.of_left and any(gone_before):
            num_left = sum_together(comm, (len(members),), own.count_left).tolist()
            num_gone = [num - left for num, left in zip(own.numels, num_left, strict=True)]

        order = unit_order(score)
        selection, keys = own.competing.select(self.sparsity, num_gone, lambda _: order, own.entries)
        thresholds = [_threshold(key, scale, score) for key, scale in zip(keys, own.scales, strict=True)]
        stays = cache(lambda: own.stays(selection))
        answered: Callable[[], Sequence[BoolArray]] = list
        if any(num_cut):
            answered = own.inquiry.answer(lambda: own.answers(stays()))
        of_blocks = cache(lambda: own.joined(stays(), answered()))

        def decide(scores: LocalScores, put: Put) -> torch.Tensor:
            part, (ids, keep) = own.part(scores), of_blocks()[ranked.index[scores.shard.name]]
            return part.decide(keep[torch.from_numpy(np.searchsorted(ids, part.ids))], put)

        return Choice(thresholds, decide)


class _ShardBlocks(ShardUnits):
    """The blocks of one shard: their numbers in the whole parameter, ``ids``, ascend."""

    def __init__(self, scores: LocalScores, size: int) -> None:
        self._size, self._matrix = size, scores.shard.as_matrix()
        self._num_across = max(self._matrix.num_in // size, 1)
        matrix, first = _lines(scores.shard.geometry, self._matrix)
        rows, row, num_rows = np.unique(matrix.rows // size, return_inverse=True, return_counts=True)
        columns, column, num_columns = np.unique(matrix.columns // size, return_inverse=True, return_counts=True)
        self.ids = (rows[:, None] * self._num_across + columns).reshape(-1)
        of_rows, of_columns = torch.from_numpy(row * len(columns)), torch.from_numpy(column)
        if matrix.num_local_out is None:
            super().__init__(scores, len(self.ids), of_rows, of_columns[None], first)
        else:
            super().__init__(scores, len(self.ids), of_columns, of_rows.view(-1, matrix.num_local_out), first)
        num_elements = (num_rows[:, None] * num_columns).reshape(-1)
        if first is not None:
            there = torch.zeros(self.num_units, dtype=torch.int64, device=scores.device)
            for at, units in self.tiles():
                units.add(there, torch.ones(at.stop - at.start, dtype=torch.int64, device=scores.device))
            num_elements = fetched([there])[0].numpy()
        self.is_whole: BoolArray = num_elements == size * size
        self.is_cut: BoolArray = (num_elements > 0) & ~self.is_whole

    def question(self, first: int, table: torch.Tensor, num_ranks: int) -> Question:
        """Return what the homes of the cut blocks are told, and asked: their sums, if this rank owns them."""
        cut = np.flatnonzero(self.is_cut)
        sums = table[torch.from_numpy(cut)].numpy() * int(self.scores.shard.owned)
        home = home_of(self.ids[cut] // self._num_across * self._size, 0, self._matrix.num_rows, num_ranks)
        rows = np.column_stack([first + self.ids[cut], sums])
        return Question(home, lambda places: rows[places].tobytes())


class _OwnBlocks:
    """The blocks of which this rank holds a part, and the cut ones that it decides. Its methods run within rounds."""

    def __init__(self, ranked: Ranked, size: int, scope: Scope) -> None:
        self._ranked = ranked
        self._size = size
        self._parts: dict[int, _ShardBlocks] = {}  # by member
        self.numels = [numel // size**2 for numel in ranked.numels]  # in blocks
        self.competing = Competing(ranked, scope, self.numels)
        self._firsts = list(itertools.accumulate(self.numels, initial=0))  # messages number all members' blocks
        self.scales: Sequence[int | None] = [None] * len(ranked.numels)  # random scores have none
        self.inquiry = Inquiry(ranked.comm)
        self._asked: list[IntArray] = []  # by rank: numbers, and rows of a table

    def part(self, scores: LocalScores) -> _ShardBlocks:
        """Return the blocks of ``scores``, of one of this rank's shards or of a piece of one."""
        member = self._ranked.index[scores.shard.name]
        if member not in self._parts:
            self._parts[member] = _ShardBlocks(scores, self._size)
        part = self._parts[member]
        return part if part.scores is scores else _ShardBlocks(scores, self._size)

    @cached_property
    def _tables(self) -> dict[int, torch.Tensor]:
        tables = fetched([part.table(self.scales[member]) for member, part in self._parts.items()])
        return dict(zip(self._parts, tables, strict=True))

    def ask(self) -> None:
        """Tell the homes of cut blocks this rank's sums. Every rank must call it: two rounds."""

        def questions() -> list[Question]:
            ranks = self._ranked.comm.size
            return [part.question(self._firsts[i], self._tables[i], ranks) for i, part in self._parts.items()]

        messages = self.inquiry.ask(questions)
        self._asked = [np.frombuffer(message, np.int64).reshape(-1, 1 + NUM_COLUMNS) for message in messages]

    @cached_property
    def _decided(self) -> tuple[dict[int, tuple[IntArray, torch.Tensor]], IntArray]:
        """The cut blocks whose home is this rank: by member their ids, ascending, and their table.

        And the place among them of every block that was asked about.
        """
        rows = np.concatenate([np.empty((0, 1 + NUM_COLUMNS), dtype=np.int64), *self._asked])
        ids, place = np.unique(rows[:, 0], return_inverse=True)
        table = torch.zeros((len(ids), NUM_COLUMNS), dtype=torch.int64, device="cpu")
        table.index_add_(0, torch.from_numpy(place), torch.from_numpy(rows[:, 1:]))
        bounds = enumerate(itertools.pairwise(np.searchsorted(ids, self._firsts).tolist()))
        return {i: (ids[a:b] - self._firsts[i], table[a:b]) for i, (a, b) in bounds if a < b}, place

    def count_left(self, left: torch.Tensor) -> None:
        """Add the number of blocks in which something is left, by member."""
        for member, part in self._parts.items():
            if part.scores.shard.owned:
                left[member] += torch.count_nonzero(
                    ~self._is_gone(self._tables[member][torch.from_numpy(part.is_whole)])
                )
        for member, (_, table) in self._decided[0].items():
            left[member] += torch.count_nonzero(~self._is_gone(table))

    def entries(self) -> list[Entry]:
        """Return what competes: the whole blocks of each of this rank's shards, then the cut ones that it decides."""
        found = []
        for member, part in self._parts.items():
            whole = self._tables[member][torch.from_numpy(part.is_whole)]
            found.append(self._entry(member, part.ids[part.is_whole], whole, owned=part.scores.shard.owned))
        return [*found, *(self._entry(member, *of, owned=True) for member, of in self._decided[0].items())]

    def stays(self, selection: Selection) -> list[BoolArray]:
        """Return which blocks of each of :meth:`entries` stay."""
        entries = self.entries()
        puts = [MaskPut.empty(entry.geometry.local_shape, entry.scores.device) for entry in entries]
        selection.decide(entries, puts)
        return [put.mask.numpy() for put in puts]

    def _entry(self, member: int, ids: IntArray, table: torch.Tensor, *, owned: bool) -> Entry:
        name, score = self._ranked.roster.members[member].name, self._ranked.score
        values = score.of_units(name, torch.from_numpy(ids)) if score.scores_units else sums_of(table, score)
        is_gone = self._is_gone(table) & (not self._ranked.regrows)
        keys = UnitKeys(Geometry((self.numels[member],), (_runs(ids),)), values, is_gone)
        return self.competing.entry(member, keys, keys.geometry, owned=owned)

    def _is_gone(self, table: torch.Tensor) -> torch.Tensor:
        return table[:, NUM_GONE] == self._size**2

    def answers(self, stays: Sequence[BoolArray]) -> list[list[bytes]]:
        """Return the answers to the ranks that asked this one."""
        of_cut = np.concatenate([np.empty(0, dtype=np.bool_), *stays[len(self._parts) :]])[self._decided[1]]
        ends = np.cumsum([len(rows) for rows in self._asked])
        return [[answer.tobytes()] for answer in np.split(of_cut, ends[:-1])]

    def joined(
        self, stays: Sequence[BoolArray], answered: Sequence[BoolArray]
    ) -> dict[int, tuple[IntArray, torch.Tensor]]:
        """Return by member the ids of this rank's blocks, and which of them stay."""
        found = {}
        for i, (member, part) in enumerate(self._parts.items()):
            keep = np.empty(part.num_units, dtype=np.bool_)
            keep[part.is_whole] = stays[i]
            if answered:
                keep[part.is_cut] = answered[i]
            found[member] = part.ids, torch.from_numpy(keep)
        return found


def _lines(geometry: Geometry, matrix: Matrix) -> tuple[LocalMatrix, int | None]:
    """Return the lines that local elements fill, and ``first`` of :class:`ShardUnits`.

    Of a stretch of the flattened parameter: all the rows that it touches, of which it may hold only parts.
    """
    if not geometry.local_numel:
        return LocalMatrix(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), None), None
    if (local := LocalMatrix.of(geometry, matrix)) is not None:
        return local, None
    if matrix.transposed:
        return LocalMatrix(np.arange(matrix.num_rows), np.arange(matrix.num_in), matrix.num_out), 0
    ends = geometry.flat_indices_at(torch.tensor([0, geometry.local_numel - 1], dtype=torch.int64, device="cpu"))
    low, high = matrix.place(ends)[0].tolist()
    return LocalMatrix(np.arange(low, high + 1), np.arange(matrix.num_in), None), low * matrix.num_in


def _runs(ids: IntArray) -> tuple[tuple[int, int], ...]:
    """Return ascending ``ids`` as half-open runs."""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(ids, breaks)) if len(ids) else ()


def _threshold(key: float | int | None, scale: int | None, score: Score) -> float | int | None:
    """Return the sum for which a key on the grid stands. A random key stands for itself."""
    if key is None or scale is None:
        return key
    order = unit_order(score)
    if key in (order.first, order.last):
        return math.copysign(math.inf, key)
    return math.ldexp(int(key), -scale)
