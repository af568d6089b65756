"""Units that compete wherever shard edges cut them: what a rank tells their homes, and what it is answered.

Noun: the *home* of a unit is the rank that decides it. Each rank is the home of an equal range of rows, so that in the
usual layouts the home of a row holds a part of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives.agree import swap_known, swap_unknown
from distprune.collectives.base import Communicator

IntArray = npt.NDArray[np.int64]


def home_of(rows: IntArray, first: int, last: int, num_ranks: int) -> IntArray:
    """Return the home of each of ``rows``, which lie between ``first`` and ``last``. Local."""
    return (rows - first) // -(-(last - first) // num_ranks)


@dataclass(frozen=True)
class Question:
    """What a rank asks about some units: the ``home`` of each, and what a home is told of some."""

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

        def messages() -> dict[int, torch.Tensor]:
            self._questions = make()
            pieces = defaultdict[int, list[bytes]](list)
            for i, question in enumerate(self._questions):
                for rank in np.unique(question.home).tolist():
                    items = np.flatnonzero(question.home == rank)
                    pieces[rank].append(question.encoded(items))
                    self._asked[rank].append((i, items))
            num = self._num_asked()
            return {rank: _message([np.int64(num[rank]).tobytes(), *of_rank]) for rank, of_rank in pieces.items()}

        received = [bytes(message.numpy()) for message in swap_unknown(self._comm, messages)]
        self._num_to_answer = [int.from_bytes(message[:8], "little") for message in received]
        return [message[8:] for message in received]

    def answer(self, make: Callable[[], list[list[bytes]]]) -> Callable[[], list[npt.NDArray[np.bool_]]]:
        """Return a function that returns the answers to each question, by item. One round.

        ``make`` returns this rank's answers by rank, in the order in which it was asked.
        """
        sizes = self._num_to_answer, self._num_asked()
        received = swap_known(
            self._comm, lambda: {rank: _message(answer) for rank, answer in enumerate(make()) if any(answer)}, sizes
        )

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


def _message(pieces: Sequence[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
