"""Blocks of weights that compete with each other, wherever shard edges cut them.

Nouns: a *block* is ``size`` x ``size`` weights of a matrix, numbered row-major. A block is *cut* where a
rank holds some of it and not all; its sum is put together on its *home* (see ``cut_units``), which then
enters it into the competition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives import Communicator, Roster
from distprune.methods.amount import num_to_prune
from distprune.methods.cut_units import home_of, message_of
from distprune.methods.decide import Candidate, Decision, Rule, score_of, score_order, total_census
from distprune.methods.within_rows import matrix_of
from distprune.scores import Random, grid_scale, on_grid
from distprune.selection import Block, Competition, Entry, NonZero, Order, Scores, common_order, select_lowest
from distprune.shards import Geometry, LocalMatrix, LocalShard, chunk_size, flat_chunk

__all__ = ["decide_blocks"]

IntArray = npt.NDArray[np.int64]

_SUM, _NUM_INFINITE, _NUM_LEFT, _NUM_COLUMNS = 0, 1, 2, 3  # of a table of blocks
_ORDER = Order("value", torch.int64)


def decide_blocks(
    comm: Communicator, roster: Roster, candidates: Sequence[Candidate], pattern: Block, rule: Rule
) -> Decision:
    """Return which blocks ``pattern`` prunes by the scores of ``rule``. Every rank must call it, owners settled.

    A block's score is the sum of its elements' |values| that are left, on a grid common to all that
    compete (``scores/exact_sum.py``), or at random a hash of its number. Blocks with nothing left are out,
    or go first (``rule.zeros``); equal scores go from the first block up.

    Rounds: one for the census (40 bytes a parameter), one for the grid (8 bytes a parameter; not at random),
    one to count the blocks left where some weights were pruned before and are out, and those of
    ``select_lowest``. Where a rank holds a block in part, three more: sizes, 32 bytes for each block it
    holds in part and 24 for each parameter and home, and a byte a block back.

    Raises:
        ValueError: on every rank: values are NaN, replicas differ, elements without an owner, or an amount
            of more blocks than are left.
        TypeError: on every rank: values of dtypes that have no common order.
    """
    place = roster.index()
    for members in [roster.members] if rule.scope == "global" else [[member] for member in roster.members]:
        score_order(members, rule.method)  # raises alike on all ranks
    parts = [_Part(candidate, place[candidate.shard.name], pattern.size) for candidate in candidates]
    census = total_census(comm, roster, candidates, rule, [int((~part.is_whole).sum()) for part in parts])
    scales = [0] * len(roster.members)
    if rule.method == "magnitude":
        scales = _scales(comm, len(scales), parts, pattern.size, rule.scope)
    for part in parts:
        part.fill(rule, scales[part.member])
    homes = _put_together(comm, parts) if any(census.num_cut) else _Homes({}, [], [])

    numels = [math.prod(member.global_shape) // pattern.size**2 for member in roster.members]  # in blocks
    is_out = rule.zeros == "out" and any(census.num_zeros)
    left = _count_left(comm, parts, homes, len(numels)) if is_out else numels
    competitions, competition_of, first_position = _competitions(roster, numels, left, pattern, rule)

    def entry(member: int, ids: IntArray, table: torch.Tensor, owned: bool) -> Entry:
        name = roster.members[member].name
        geometry = Geometry((numels[member],), (_runs(ids),))
        scores = _scores(name, geometry, table, rule, census.seed)
        eligible = NonZero(table[:, _NUM_LEFT]) if is_out else None
        return Entry(name, scores, geometry, owned, competition_of[member], first_position[member], eligible)

    entries = [
        entry(part.member, part.ids[part.is_whole], part.table[part.is_whole_here], bool(part.candidate.shard.owned))
        for part in parts
    ]
    entries += [entry(member, ids, table, True) for member, (ids, table) in homes.tables.items()]
    selection = select_lowest(comm, competitions, entries)
    keep = [np.ones(len(part.ids), dtype=np.bool_) for part in parts]
    for part, of_part, mask in zip(parts, keep, selection.masks, strict=False):
        of_part[part.is_whole] = mask.numpy()
    if any(census.num_cut):
        kept = dict(zip(homes.tables, selection.masks[len(parts) :], strict=True))
        homes.answer(comm, keep, {member: mask.numpy() for member, mask in kept.items()})
    masks = [part.spread(of_part) for part, of_part in zip(parts, keep, strict=True)]
    thresholds = [_threshold(selection.thresholds[c], scale) for c, scale in zip(competition_of, scales, strict=True)]
    return Decision(masks, census.num_zeros, thresholds, census.seed)


class _Part:
    """One parameter on this rank, by the blocks it holds something of: ``ids``, ascending."""

    def __init__(self, candidate: Candidate, member: int, size: int) -> None:
        self.candidate = candidate
        self.member = member
        self.size = size
        self.matrix = matrix_of(candidate.shard)
        self._num_across = self.matrix.num_in // size
        geometry = candidate.shard.geometry
        self._local = LocalMatrix.of(geometry, self.matrix) if geometry.local_numel else None
        if self._local is not None:
            rows, self._row_slot, num_rows = _counted(self._local.rows // size)
            columns, self._column_slot, num_columns = _counted(self._local.columns // size)
            self._num_slots_across = len(columns)
            self.ids = (rows[:, None] * self._num_across + columns).reshape(-1)
            num_elements = (num_rows[:, None] * num_columns).reshape(-1)
        else:
            chunks = [np.unique(self._blocks(start, stop)) for start, stop in self._chunks()]
            self.ids = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *chunks]))
            num_elements = np.zeros(len(self.ids), dtype=np.int64)
            for start, stop in self._chunks():
                num_elements += np.bincount(self._slots(start, stop), minlength=len(self.ids))
        self.is_whole: npt.NDArray[np.bool_] = num_elements == size * size
        self.is_whole_here = torch.from_numpy(self.is_whole)
        self.table = torch.zeros((len(self.ids), _NUM_COLUMNS), dtype=torch.int64)

    def _chunks(self) -> list[tuple[int, int]]:
        shard = self.candidate.shard
        numel, step = shard.geometry.local_numel, chunk_size(shard.local.device)
        return [(start, min(start + step, numel)) for start in range(0, numel, step)]

    def _blocks(self, start: int, stop: int) -> IntArray:
        rows, columns = self.matrix.place(self.candidate.shard.geometry.flat_indices(start, stop))
        return rows // self.size * self._num_across + columns // self.size

    def _slots(self, start: int, stop: int) -> IntArray:
        """Return the place in ``ids`` of the block of every local element from ``start`` to ``stop``."""
        if self._local is None:
            return np.searchsorted(self.ids, self._blocks(start, stop))
        rows, columns = self._local.split(start, stop)
        return self._row_slot[rows] * self._num_slots_across + self._column_slot[columns]

    def _values(self, scores: Scores, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return |values| as float64, zero where pruned before, and what is left (bool)."""
        values = scores.values(start, stop).to(torch.float64).abs()
        zeros_of = self.candidate.zeros_of
        if zeros_of is None:
            return values, torch.ones_like(values, dtype=torch.bool)
        left = flat_chunk(zeros_of, start, stop) != 0
        return values.masked_fill(~left, 0.0), left

    def largest(self) -> float:
        """Return the largest finite |value|."""
        largest, scores = 0.0, score_of(self.candidate.shard, Rule("magnitude", 0, "tensor"), None)
        for start, stop in self._chunks():
            values, _ = self._values(scores, start, stop)
            largest = max(largest, float(values.masked_fill_(values.isinf(), 0.0).max()))
        return largest

    def fill(self, rule: Rule, scale: int) -> None:
        """Add up the table of the local blocks."""
        scores = score_of(self.candidate.shard, Rule("magnitude", 0, "tensor"), None)
        for start, stop in self._chunks():
            values, left = self._values(scores, start, stop)
            slots = torch.from_numpy(self._slots(start, stop))
            self.table[:, _NUM_LEFT].index_add_(0, slots, left.cpu().to(torch.int64))
            if rule.method == "magnitude":
                infinite = values.isinf()
                sums = on_grid(values.masked_fill(infinite, 0.0), scale)
                self.table[:, _SUM].index_add_(0, slots, sums.cpu())
                self.table[:, _NUM_INFINITE].index_add_(0, slots, infinite.cpu().to(torch.int64))

    def cut_homes(self, num_ranks: int) -> list[tuple[int, IntArray]]:
        """Return (home, places in ``ids``) of the cut blocks, by home."""
        cut = np.flatnonzero(~self.is_whole)
        home = home_of(self.ids[cut] // max(self._num_across, 1) * self.size, 0, self.matrix.num_rows, num_ranks)
        return [(int(rank), cut[home == rank]) for rank in np.unique(home)]

    def spread(self, keep: npt.NDArray[np.bool_]) -> torch.Tensor:
        """Return the local mask of what stays, given which of the local blocks do."""
        shard = self.candidate.shard
        mask = torch.empty(shard.geometry.local_shape, dtype=torch.bool, device=shard.local.device)
        for start, stop in self._chunks():
            mask.view(-1)[start:stop] = torch.from_numpy(keep[self._slots(start, stop)]).to(mask.device)
        return mask


def _counted(blocks: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    found, slot, count = np.unique(blocks, return_inverse=True, return_counts=True)
    return found, slot, count


def _scales(
    comm: Communicator, num_members: int, parts: Sequence[_Part], size: int, scope: Literal["global", "tensor"]
) -> list[int]:
    largest = torch.zeros(num_members, dtype=torch.float64)
    for part in parts:
        largest[part.member] = part.largest()
    of_member = comm.max(largest).tolist()
    if scope == "global":
        of_member = [max(of_member, default=0.0)] * num_members
    return [grid_scale(size * size, each) for each in of_member]


@dataclass(frozen=True)
class _Homes:
    """Cut blocks that this rank decides: by member their ids, ascending, and their table.

    ``asked``: by rank the questions it asked, in order; ``sent``: by rank what this one asked it.
    """

    tables: dict[int, tuple[IntArray, torch.Tensor]]
    asked: list[list[tuple[int, IntArray]]]  # (member, ids)
    sent: list[list[tuple[int, IntArray]]]  # (part, places in its ids)

    def answer(
        self,
        comm: Communicator,
        keep: Sequence[npt.NDArray[np.bool_]],
        decided: dict[int, npt.NDArray[np.bool_]],
    ) -> None:
        """Tell every rank which of its cut blocks stay, and write into ``keep`` what is told here (one round)."""
        answers = [
            [decided[member][np.searchsorted(self.tables[member][0], ids)].tobytes() for member, ids in of_rank]
            for of_rank in self.asked
        ]
        told = comm.swap(
            [message_of(answer) for answer in answers],
            [sum(len(places) for _, places in of_rank) for of_rank in self.sent],
        )
        for said, of_rank in zip(told, self.sent, strict=True):
            pieces = torch.split(said, [len(places) for _, places in of_rank]) if of_rank else ()
            for (i, places), piece in zip(of_rank, pieces, strict=True):
                keep[i][places] = piece.numpy().astype(np.bool_)


def _put_together(comm: Communicator, parts: Sequence[_Part]) -> _Homes:
    """Add up the cut blocks on their homes: two rounds."""
    messages: list[list[bytes]] = [[] for _ in range(comm.size)]
    sent: list[list[tuple[int, IntArray]]] = [[] for _ in range(comm.size)]
    for i, part in enumerate(parts):
        counts = int(bool(part.candidate.shard.owned))  # replicas ask, and add nothing
        for home, places in part.cut_homes(comm.size):
            rows = part.table[torch.from_numpy(places)].numpy() * counts
            messages[home] += [
                np.array([part.member, len(places)]).tobytes(),
                part.ids[places].tobytes(),
                rows.tobytes(),
            ]
            sent[home].append((i, places))
    received = comm.swap([message_of(message) for message in messages])
    asked: list[list[tuple[int, IntArray]]] = []
    found: dict[int, list[tuple[IntArray, IntArray]]] = {}
    for message in received:
        words, at = np.frombuffer(bytes(message.numpy()), np.int64), 0
        asked.append([])
        while at < len(words):
            member, num = words[at : at + 2].tolist()
            ids = words[at + 2 : at + 2 + num]
            at += 2 + num * (1 + _NUM_COLUMNS)
            asked[-1].append((member, ids))
            found.setdefault(member, []).append((ids, words[at - num * _NUM_COLUMNS : at].reshape(num, _NUM_COLUMNS)))
    tables: dict[int, tuple[IntArray, torch.Tensor]] = {}
    for member, pieces in sorted(found.items()):
        ids, slot = np.unique(np.concatenate([ids for ids, _ in pieces]), return_inverse=True)
        table = torch.zeros((len(ids), _NUM_COLUMNS), dtype=torch.int64)
        table.index_add_(0, torch.from_numpy(slot), torch.from_numpy(np.concatenate([rows for _, rows in pieces])))
        tables[member] = ids, table
    return _Homes(tables, asked, sent)


def _count_left(comm: Communicator, parts: Sequence[_Part], homes: _Homes, num_members: int) -> list[int]:
    left = torch.zeros(num_members, dtype=torch.int64)
    for part in parts:
        if part.candidate.shard.owned:
            left[part.member] += torch.count_nonzero(part.table[part.is_whole_here, _NUM_LEFT])
    for member, (_, table) in homes.tables.items():
        left[member] += torch.count_nonzero(table[:, _NUM_LEFT])
    counts: list[int] = comm.sum(left).tolist()
    return counts


def _competitions(
    roster: Roster, numels: Sequence[int], left: Sequence[int], pattern: Block, rule: Rule
) -> tuple[list[Competition], list[int], list[int]]:
    order = common_order([("value", torch.int32)]) if rule.method == "random" else _ORDER
    if rule.scope == "global":
        where = "all parameters together"
        num_lowest = num_to_prune(pattern.amount, sum(left), where)
        whole = Competition(where, order, sum(numels), sum(left), num_lowest)
        return [whole], [0] * len(numels), list(itertools.accumulate(numels, initial=0))[:-1]
    return (
        [
            Competition(member.name, order, numel, num, num_to_prune(pattern.amount, num, repr(member.name)))
            for member, numel, num in zip(roster.members, numels, left, strict=True)
        ],
        list(range(len(numels))),
        [0] * len(numels),
    )


def _runs(ids: IntArray) -> tuple[tuple[int, int], ...]:
    """Return ascending ``ids`` as stretches."""
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(ids, breaks)) if len(ids) else ()


@dataclass(frozen=True)
class _Given:
    """Scores as they are, int64."""

    given: torch.Tensor
    ordered_by: Literal["value"] = "value"
    dtype: torch.dtype = torch.int64

    @property
    def device(self) -> torch.device:
        return self.given.device

    def values(self, start: int, stop: int) -> torch.Tensor:
        return self.given[start:stop]

    def values_at(self, offsets: torch.Tensor) -> torch.Tensor:
        return self.given[offsets]


def _scores(name: str, geometry: Geometry, table: torch.Tensor, rule: Rule, seed: int | None) -> Scores:
    """Return the scores of whole blocks; one with nothing left scores -1."""
    left = table[:, _NUM_LEFT].contiguous()
    if rule.method == "random":
        return Random(LocalShard(name, left, geometry), int(seed or 0), zeros_first=True)
    sums = table[:, _SUM].masked_fill(table[:, _NUM_INFINITE] > 0, _ORDER.last)
    return _Given(sums.masked_fill(left == 0, -1))


def _threshold(key: float | int | None, scale: int) -> float | None:
    """Return the sum that a key on the grid stands for; a random one is itself."""
    if key is None or key == _ORDER.last:
        return None if key is None else math.inf
    return math.ldexp(max(int(key), 0), -scale)
