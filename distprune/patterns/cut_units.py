"""Groups and rows that a shard edge cuts: one rank collects each, decides it, and answers the others.

Nouns: a *unit* is decided by itself: the m inputs of an N:M group, or a row. A unit is *cut* on a rank that holds
some of it and not all. Its *home* is the rank that decides it. Each rank is the home of an equal range of rows, so
that in the usual layouts the home of a row holds a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives import Communicator, swap_known, swap_unknown
from distprune.shards import Geometry, LocalMatrix, Matrix

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]

_NUM_HEADER_WORDS = 8  # of one parameter's part in a message
_KEY_TYPES: dict[int, type[np.signedinteger[Any]]] = {2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class LocalUnits:
    """This rank's elements of one parameter: those in whole units, and those in cut units.

    ``matrix`` holds the local elements from offset ``begin``. ``whole`` and ``cut`` are the local columns of its whole
    and of its cut units. ``loose``: local offsets of elements in cut units outside the matrix.
    """

    begin: int
    matrix: LocalMatrix
    whole: IntArray
    cut: IntArray
    loose: IntArray

    @property
    def num_cut(self) -> int:
        """Elements in cut units."""
        return len(self.matrix.rows) * len(self.cut) + len(self.loose)

    @property
    def is_dense(self) -> bool:
        """Whether the matrix is contiguous local elements, row by row, without cut units."""
        return self.matrix.num_local_out is None and len(self.cut) == 0

    def cut_offsets(self, geometry: Geometry, matrix: Matrix, first: int, last: int) -> IntArray:
        """Return the local offsets of the elements in cut units of the rows ``first`` to ``last``."""
        rows = np.flatnonzero((self.matrix.rows >= first) & (self.matrix.rows < last)) if len(self.cut) else self.cut
        place, _ = matrix.place(geometry.flat_indices_at(torch.from_numpy(self.loose)).numpy())
        loose = self.loose[(place >= first) & (place < last)]
        return np.concatenate([self.begin + self.matrix.offsets(rows, self.cut).reshape(-1), loose])


def find_units(geometry: Geometry, matrix: Matrix, length: int) -> LocalUnits:
    """Return which local elements are in whole and in cut units of ``length`` inputs of one row. Local."""
    none = np.empty(0, dtype=np.int64)
    numel = geometry.local_numel
    if numel == 0:
        return LocalUnits(0, LocalMatrix(none, none, None), none, none, none)
    local = LocalMatrix.of(geometry, matrix)
    if local is None:  # a stretch of the flattened parameter: whole units in the middle, cut ones at its ends
        first = -geometry.flat_start % length if geometry.flat_start is not None and not matrix.transposed else numel
        num_units = max(0, numel - first) // length
        end = first + num_units * length if num_units else 0
        columns = np.arange(length if num_units else 0)
        loose = np.concatenate([np.arange(first if num_units else 0), np.arange(end, numel)])
        return LocalUnits(first, LocalMatrix(np.arange(num_units), columns, None), columns, none, loose)
    if len(local.columns) == matrix.num_in:  # whole rows
        return LocalUnits(0, local, np.arange(matrix.num_in), none, none)
    _, unit, size = np.unique(local.columns // length, return_inverse=True, return_counts=True)
    is_whole = size[unit] == length
    return LocalUnits(0, local, np.flatnonzero(is_whole), np.flatnonzero(~is_whole), none)


def home_of(rows: IntArray, first: int, last: int, num_ranks: int) -> IntArray:
    """Return the home of each of ``rows``, which lie between ``first`` and ``last``. Local."""
    return (rows - first) // -(-(last - first) // num_ranks)


@dataclass(frozen=True)
class CutElements:
    """Elements of one parameter in cut units, as a rank tells their homes of them."""

    member: int  # of the roster
    matrix: Matrix
    length: int  # of a unit
    flat: IntArray
    rows: tuple[int, int] = (0, 0)  # the range of rows that the ranks share as homes; does not travel
    keys: Array | None = None  # of an owner


@dataclass(frozen=True)
class Question:
    """What a rank asks about some items, elements or blocks: the ``home`` of each, and what a home is told of some."""

    home: IntArray
    encoded: Callable[[IntArray], bytes]  # of the items with these numbers


class Inquiry:
    """Questions to the homes and their answers, one byte for each item asked about. Three rounds.

    Every rank must call both methods. Messages are made within the rounds, so an error on one rank is raised on all.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._questions: Sequence[Question] = []
        self._asked: list[list[tuple[int, IntArray]]] = [[] for _ in range(comm.size)]  # by rank: (question, items)
        self._num_to_answer: list[int] = []

    def ask(self, make: Callable[[], Sequence[Question]]) -> list[bytes]:
        """Return what this rank is asked, by rank; ``make`` returns what it asks.

        Two rounds: the sizes, 8 bytes a rank, and the questions, each after 8 bytes for the number of its items.
        """

        def messages() -> list[torch.Tensor]:
            self._questions = make()
            pieces: list[list[bytes]] = [[] for _ in self._asked]
            for i, question in enumerate(self._questions):
                for rank in np.unique(question.home).tolist():
                    items = np.flatnonzero(question.home == rank)
                    pieces[rank].append(question.encoded(items))
                    self._asked[rank].append((i, items))
            return [
                _message([np.int64(num).tobytes(), *of_rank] if of_rank else [])
                for num, of_rank in zip(self._num_asked(), pieces, strict=True)
            ]

        received = [bytes(message.numpy()) for message in swap_unknown(self._comm, messages)]
        self._num_to_answer = [int.from_bytes(message[:8], "little") for message in received]
        return [message[8:] for message in received]

    def answer(self, make: Callable[[], list[list[bytes]]]) -> Callable[[], list[npt.NDArray[np.bool_]]]:
        """Return a function that returns the answers to each question, by item. One round.

        ``make`` returns this rank's answers by rank, in the order in which it was asked.
        """
        sizes = self._num_to_answer, self._num_asked()
        received = swap_known(self._comm, lambda: [_message(answer) for answer in make()], sizes)

        @cache  # every part asks for its own
        def answers() -> list[npt.NDArray[np.bool_]]:
            found = [np.empty(len(question.home), dtype=np.bool_) for question in self._questions]
            for message, of_rank in zip(received, self._asked, strict=True):
                stays = torch.split(message, [len(items) for _, items in of_rank])
                for (i, items), answer in zip(of_rank, stays, strict=True):
                    found[i][items] = answer.numpy()
            return found

        return answers

    def _num_asked(self) -> list[int]:
        return [sum(len(items) for _, items in of_rank) for of_rank in self._asked]


def decide_cut(
    comm: Communicator,
    make_parts: Callable[[], Sequence[CutElements]],
    keep: Callable[[int, torch.Tensor], torch.Tensor],
) -> Callable[[], list[npt.NDArray[np.bool_]]]:
    """Return a function that returns what stays of each part (bool). Every rank of ``comm`` must call it.

    ``make_parts`` returns this rank's parts. A home decides whole units by ``keep(member, keys)``, with
    keys (units, length). Three rounds: sizes (8 bytes a rank), keys, answers. A rank sends the keys that it owns, 16
    bytes for every run of consecutive flat indices, and 64 bytes for every parameter and home. It gets one byte back
    for each element.
    """

    def questions() -> list[Question]:
        return [
            Question(home_of(part.matrix.place(part.flat)[0], *part.rows, comm.size), partial(_encoded, part))
            for part in make_parts()
        ]

    inquiry = Inquiry(comm)
    asked = inquiry.ask(questions)
    return inquiry.answer(lambda: _answers(asked, keep))


def _message(pieces: Sequence[bytes]) -> torch.Tensor:
    joined = bytearray(b"".join(pieces))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8, device="cpu")


def _encoded(part: CutElements, chosen: IntArray) -> bytes:
    flat, matrix = part.flat[chosen], part.matrix
    begins = np.flatnonzero(np.diff(flat, prepend=flat[0] - 2) != 1)
    lengths = np.diff(begins, append=len(flat))
    keys = np.empty(0, dtype=np.int64) if part.keys is None else part.keys[chosen]
    header = [part.member, matrix.num_matrices, matrix.num_out, matrix.num_in, int(matrix.transposed), part.length]
    sizes = [len(begins), 0 if part.keys is None else keys.itemsize]
    words = np.concatenate([np.array(header + sizes), flat[begins], lengths]).astype(np.int64)
    return words.tobytes() + keys.tobytes().ljust(-(-keys.nbytes // 8) * 8, b"\0")


def _decoded(message: bytes) -> Iterator[CutElements]:
    """Yield all that a rank told: the parts of which the message was :func:`_encoded`."""
    at = 0
    while at < len(message):
        header = np.frombuffer(message, np.int64, _NUM_HEADER_WORDS, at).tolist()
        member, num_matrices, num_out, num_in, transposed, length, num_runs, key_size = header
        at += 8 * _NUM_HEADER_WORDS
        begins, lengths = np.frombuffer(message, np.int64, 2 * num_runs, at).reshape(2, num_runs)
        at += 16 * num_runs
        flat = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        keys = np.frombuffer(message, _KEY_TYPES[key_size], len(flat), at) if key_size else None
        at += -(-len(flat) * key_size // 8) * 8
        yield CutElements(member, Matrix(num_out, num_in, bool(transposed), num_matrices), length, flat, keys=keys)


def _answers(questions: Sequence[bytes], keep: Callable[[int, torch.Tensor], torch.Tensor]) -> list[list[bytes]]:
    """Decide the units that the ranks ask about. Return the answers by rank, in the order of its questions."""
    asked = [[*_decoded(message)] for message in questions]
    answers = [[b""] * len(of_rank) for of_rank in asked]
    by_member: dict[int, list[tuple[int, int]]] = {}  # rank, and number of the question
    for rank, of_rank in enumerate(asked):
        for number, part in enumerate(of_rank):
            by_member.setdefault(part.member, []).append((rank, number))
    for member, places in by_member.items():
        parts = [asked[rank][number] for rank, number in places]
        matrix, length = parts[0].matrix, parts[0].length
        rows, columns = matrix.place(np.concatenate([part.flat for part in parts]))
        units, unit = np.unique(rows * (matrix.num_in // length) + columns // length, return_inverse=True)
        ends = np.cumsum([len(part.flat) for part in parts])[:-1]
        at = [*zip(np.split(unit, ends), np.split(columns % length, ends), strict=True)]
        table = np.zeros((len(units), length), next(part.keys.dtype for part in parts if part.keys is not None))
        for part, where in zip(parts, at, strict=True):
            if part.keys is not None:
                table[where] = part.keys
        kept = keep(member, torch.from_numpy(table)).numpy()
        for (rank, number), where in zip(places, at, strict=True):
            answers[rank][number] = kept[where].tobytes()
    return answers
