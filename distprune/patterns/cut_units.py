"""Groups and rows that a shard edge cuts: one rank collects each, decides it, and answers the others.

Nouns: the *line* of a parameter is the ranks that share its rows: neighbours in its mesh, which hold the same rows and
other columns; or, where no layout says which these are, all that hold a part of it. Each rank of a line is the *home*
of an equal range of the rows: it decides their cut units (see ``local_units``). A *turn* is a part of each range.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor

from distprune.collectives.agree import max_together, swap_known, swap_unknown
from distprune.collectives.base import Communicator
from distprune.collectives.roster import Roster
from distprune.patterns.local_units import Rectangle
from distprune.shards.device import chunk_size, fetched
from distprune.shards.geometry import runs_of
from distprune.shards.layouts import ranks_along
from distprune.shards.local_shard import LocalShard

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
Keys = Callable[[slice | torch.Tensor], torch.Tensor]  # of elements at local offsets

_BATCH = 1 << 23  # bytes of keys that a rank sends at a time, at most; some five times as many are held meanwhile
_WORD = 8  # bytes
_KEY_TYPES: dict[int, type[np.signedinteger[Any]]] = {2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Line:
    """The ``ranks`` that share rows of a parameter, and what this one has ``cut`` of the ``num_rows``.

    ``is_told_by_all``: they hold different elements; else owners tell what they hold, for all that hold the same.
    """

    ranks: Sequence[int]
    num_rows: int
    cut: Sequence[Rectangle]
    is_told_by_all: bool


class Lines:
    """The lines of which this rank is a part. No communication."""

    def __init__(self, comm: Communicator, roster: Roster) -> None:
        self._comm, self._roster = comm, roster
        self._ranks: dict[object, list[int]] = {}  # what parameters of one layout share

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The ranks by their numbers in a mesh."""
        return {self._comm.global_rank(rank): rank for rank in range(self._comm.size)}

    def of(self, member: int, shard: LocalShard, cut: Sequence[Rectangle]) -> Line:
        """Return the line of ``shard``, of which ``cut`` is in cut units; all ranks of it return the same one."""
        tensor, matrix, geometry = shard.tensor, shard.as_matrix(), shard.geometry
        # Only if all its holders state one layout do they all know their neighbours.
        if self._roster.num_copies[member] is None or len(geometry.global_shape) < 2:
            return Line(self._roster.holders(member), matrix.num_rows, cut, is_told_by_all=False)
        assert isinstance(tensor, DTensor)  # no other states a layout that cuts units
        inputs = matrix.input_dims(shard.shape)
        key = tensor.device_mesh, tensor.placements, inputs
        if key not in self._ranks:
            self._ranks[key] = [self._numbers[rank] for rank in ranks_along(*key)]
        num_rows = math.prod(size for dim, size in enumerate(geometry.local_shape) if dim not in inputs)
        numbered = [dataclasses.replace(each, rows=np.arange(num_rows)) for each in cut]
        return Line(self._ranks[key], num_rows, numbered, is_told_by_all=True)


@dataclass(frozen=True)
class CutPart:
    """The cut units of one parameter, of ``length`` elements each, as a rank of its line sees them.

    ``keys``: of what this rank tells; ``None``: owners do. ``keep(keys)`` decides units, (units, length).
    """

    name: str
    length: int
    line: Line
    device: torch.device
    key_dtype: torch.dtype
    keys: Keys | None
    keep: Callable[[torch.Tensor], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """What this rank sends in all."""
        return 0 if self.keys is None else sum(each.numel for each in self.line.cut) * self.key_dtype.itemsize

    def pieces(self, member: int, turn: int, num_turns: int) -> Iterator[tuple[int, CutPiece]]:
        """Yield what goes to each home in one of ``num_turns``, and the rank that is the home."""
        line = self.line
        for home, rank in enumerate(line.ranks):
            # Homes of few rows do not all have them in one turn.
            own_turn = (turn + home) % num_turns
            bounds = _share(*_share(0, line.num_rows, home, len(line.ranks)), own_turn, num_turns)
            for rectangle in line.cut:
                first, last = np.searchsorted(rectangle.rows, bounds).tolist()
                if first < last:
                    yield rank, CutPiece(member, rectangle, first, last, bounds[0])

    def told(self, piece: CutPiece) -> torch.Tensor:
        """Return the keys of ``piece``, on the device."""
        assert self.keys is not None
        keys = torch.empty(piece.numel, dtype=self.key_dtype, device=self.device)
        for at, there in piece.chunks(self.device):
            keys[at] = self.keys(there)
        return keys


@dataclass(frozen=True)
class CutPiece:
    """Rows ``first`` to ``last`` of one of the rectangles of ``member``. The home numbers rows from ``origin``."""

    member: int
    rectangle: Rectangle
    first: int
    last: int
    origin: int

    @property
    def numel(self) -> int:
        return (self.last - self.first) * len(self.rectangle.columns)

    def chunks(self, device: torch.device) -> Iterator[tuple[slice, slice | torch.Tensor]]:
        """Yield elements in parts small enough to work on, by their places in the piece and by local offsets."""
        width = len(self.rectangle.columns)
        step = max(1, chunk_size(device) // width)
        for row in range(self.first, self.last, step):
            last = min(row + step, self.last)
            places = slice((row - self.first) * width, (last - self.first) * width)
            yield places, self.rectangle.offsets(row, last, device)


# By member: some elements, and which of them stay, as bits.
Answers = Mapping[int, Sequence[tuple[CutPiece, npt.NDArray[np.uint8]]]]


def most_bytes(comm: Communicator, members: Sequence[int], part_of: Callable[[int], CutPart | None]) -> dict[int, int]:
    """Return the most that a rank sends of each of ``members``. Every rank must call it: one round, if there are any.

    It has 8 bytes for each of them.
    """

    def fill(words: torch.Tensor) -> None:
        for i, member in enumerate(members):
            if (part := part_of(member)) is not None:
                words[i] = part.num_bytes

    return dict(zip(members, max_together(comm, (len(members),), fill).tolist(), strict=True)) if members else {}


def batches_of(roster: Roster, num_bytes: Mapping[int, int]) -> list[list[tuple[int, int, int]]]:
    """Return what is decided at a time: (member, which turn, of how many). Local.

    ``num_bytes``: by member, the most that a rank sends. In a batch no rank sends more than 8 MiB, or so: rows are
    shared out as wholes. Members that no rank holds together share a batch.
    """
    ends = [0] * len(roster.lists)  # by list of parameters: batches that are full, times their size, and the rest
    batches: dict[int, list[tuple[int, int, int]]] = {}
    for member, total in num_bytes.items():
        lists, num_turns = roster.lists_with[member], max(1, -(-total // _BATCH))
        for turn in range(num_turns):
            batch, used = divmod(max(ends[i] for i in lists), _BATCH)
            if used + total // num_turns > _BATCH:
                batch, used = batch + 1, 0
            batches.setdefault(batch, []).append((member, turn, num_turns))
            for i in lists:
                ends[i] = batch * _BATCH + used + total // num_turns
    return [*batches.values()]


def decide_cut(
    comm: Communicator, batch: Sequence[tuple[int, int, int]], part_of: Callable[[int], CutPart | None]
) -> Callable[[], Answers]:
    """Return a function that returns what stays of this rank's cut elements. Every rank of ``comm`` must call it.

    ``part_of(member)``: ``None`` where this rank holds nothing of it. Three rounds: sizes (8 bytes a rank), keys,
    answers. A rank sends its keys, 8 bytes to every home, and 64 to it for every parameter, 16 more for every further
    run of rows or columns. It gets one bit back for each element.

    Raises:
        ValueError: on every rank: a unit whose elements have not all been told.
    """
    asked: list[list[CutPiece]] = [[] for _ in range(comm.size)]

    def questions() -> dict[int, torch.Tensor]:
        pieces: list[tuple[int, CutPiece, CutPart]] = []
        for member, turn, num_turns in batch:
            if (part := part_of(member)) is not None:
                pieces += ((rank, piece, part) for rank, piece in part.pieces(member, turn, num_turns))
        keys = iter(fetched([part.told(piece) for _, piece, part in pieces if part.keys is not None]))
        words = defaultdict[int, list[torch.Tensor]](list)
        for rank, piece, part in pieces:
            asked[rank].append(piece)
            words[rank] += _encoded(piece, None if part.keys is None else next(keys))
        # A home is told first how many bytes it is to answer.
        return {rank: torch.cat([_words([_num_answered(asked[rank])]), *of_rank]) for rank, of_rank in words.items()}

    received = swap_unknown(comm, questions)
    sizes = [int.from_bytes(bytes(message[:_WORD].numpy()), "little") for message in received]
    answers = swap_known(comm, lambda: _answers(received, part_of), (sizes, [*map(_num_answered, asked)]))

    @cache  # every member asks for its own
    def stays() -> Answers:
        found: dict[int, list[tuple[CutPiece, npt.NDArray[np.uint8]]]] = {}
        for message, pieces in zip(answers, asked, strict=True):
            packed = torch.split(message, [_num_packed(piece) for piece in pieces])
            for piece, of_piece in zip(pieces, packed, strict=True):
                found.setdefault(piece.member, []).append((piece, of_piece.numpy()))
        return found

    return stays


@dataclass(frozen=True)
class _Told:
    """A piece as its home is told of it: an owner's with ``keys``."""

    member: int
    rows: IntArray
    columns: IntArray
    keys: Array | None


def _share(first: int, last: int, index: int, num: int) -> tuple[int, int]:
    """Return the range ``index`` of ``num`` nearly equal ones."""
    return first + (last - first) * index // num, first + (last - first) * (index + 1) // num


def _num_packed(piece: CutPiece) -> int:
    return -(-piece.numel // 8)


def _num_answered(pieces: Sequence[CutPiece]) -> int:
    return sum(map(_num_packed, pieces))


def _encoded(piece: CutPiece, keys: torch.Tensor | None) -> list[torch.Tensor]:
    rows = runs_of(piece.rectangle.rows[piece.first : piece.last] - piece.origin)
    columns = runs_of(piece.rectangle.columns)
    key_size = 0 if keys is None else keys.itemsize
    words = _words([piece.member, len(rows), len(columns), key_size, *itertools.chain(*rows, *columns)])
    if keys is None:
        return [words]
    padding = torch.zeros(-keys.nbytes % _WORD, dtype=torch.uint8, device="cpu")
    return [words, keys.view(torch.uint8), padding]


def _words(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").view(torch.uint8)


def _decoded(message: npt.NDArray[np.uint8]) -> Iterator[_Told]:
    """Yield the pieces that a rank told: see :func:`_encoded`."""
    words, at = message.view(np.int64), 1
    while at < len(words):
        member, num_rows, num_columns, key_size = words[at : at + 4].tolist()
        runs = words[at + 4 : at + 4 + 2 * (num_rows + num_columns)].reshape(-1, 2).tolist()
        at += 4 + 2 * len(runs)
        rows, columns = _indices(runs[:num_rows]), _indices(runs[num_rows:])
        keys = None
        if key_size:
            num = len(rows) * len(columns)
            end = at + -(-num * key_size // _WORD)
            keys = words[at:end].view(_KEY_TYPES[key_size])[:num].reshape(len(rows), len(columns))
            at = end
        yield _Told(member, rows, columns, keys)


def _indices(runs: Sequence[Sequence[int]]) -> IntArray:
    return np.concatenate([np.arange(start, stop) for start, stop in runs])


def _answers(messages: Sequence[torch.Tensor], part_of: Callable[[int], CutPart | None]) -> dict[int, torch.Tensor]:
    """Decide the units that the ranks ask about. Return the answers by rank, in the order of its pieces."""
    told = {rank: [*_decoded(message.numpy())] for rank, message in enumerate(messages) if len(message)}
    packed = {rank: [np.empty(0, dtype=np.uint8)] * len(of_rank) for rank, of_rank in told.items()}
    by_member: dict[int, list[tuple[int, int]]] = {}  # rank, and number of the piece
    for rank, of_rank in told.items():
        for number, piece in enumerate(of_rank):
            by_member.setdefault(piece.member, []).append((rank, number))
    for member, places in by_member.items():
        part = part_of(member)
        assert part is not None
        stays = _decided(part, [told[rank][number] for rank, number in places])
        for (rank, number), of_piece in zip(places, stays, strict=True):
            packed[rank][number] = of_piece
    return {rank: torch.from_numpy(np.concatenate(of_rank)) for rank, of_rank in packed.items()}


def _decided(part: CutPart, pieces: Sequence[_Told]) -> list[npt.NDArray[np.uint8]]:
    """Return what stays of each of ``pieces``, which are all that ranks hold of some cut units, as bits."""
    length = part.length
    rows = np.unique(np.concatenate([piece.rows for piece in pieces]))
    units = np.unique(np.concatenate([piece.columns for piece in pieces]) // length)
    table = np.zeros((len(rows), len(units) * length), _KEY_TYPES[part.key_dtype.itemsize])
    num_told = np.zeros((len(rows), len(units)), dtype=np.int32)
    at = []
    for piece in pieces:
        row, unit = np.searchsorted(rows, piece.rows), np.searchsorted(units, piece.columns // length)
        at.append((row, unit, np.ix_(row, unit * length + piece.columns % length)))
        if piece.keys is not None:
            table[at[-1][2]] = piece.keys
            num_told[row] += np.bincount(unit, minlength=len(units)).astype(np.int32)
    if any((num_told[np.ix_(row, unit)] != length).any() for row, unit, _ in at):
        raise ValueError(f"ranks do not hold all of the groups or rows of {part.name!r} that they hold parts of")
    kept = np.empty(table.shape, dtype=np.bool_)
    step = max(1, chunk_size(torch.device("cpu")) // table.shape[1])
    for first in range(0, len(rows), step):
        some = torch.from_numpy(table[first : first + step])
        kept[first : first + step] = part.keep(some.view(-1, length)).view(some.shape).numpy()
    return [np.packbits(kept[place]) for _, _, place in at]
