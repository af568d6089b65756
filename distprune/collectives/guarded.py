"""Ranks that run a user's code, which may raise on one of them while the others communicate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from typing_extensions import override

from distprune.collectives.agree import agree
from distprune.collectives.base import Communicator, Op, as_met


@final
class Guarded(Communicator):
    """The ranks of another communicator. Before each collective they say that they have come to it (64 bytes).

    A rank on which the code raises meets the others with its error in the place of its next collective, and one that is
    done without one: so what raises on one rank is raised on all.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm.rank, comm.size)
        self._comm, self.traffic = comm, comm.traffic
        self.raised: Exception | None = None  # what the ranks raised together, the last time they met

    def meet(self, error: Exception | None = None) -> None:
        """Wait for the other ranks. One round of 64 bytes; two more to raise ``error`` on all."""
        if self.raised is not None:  # the ranks met for the last time
            raise self.raised
        try:
            agree(self._comm, {}, error)
        except Exception as raised:
            self.raised = raised
            raise

    @override
    def round(self, num_bytes: int) -> AbstractContextManager[None]:
        self.meet()
        return super().round(num_bytes)

    @override
    def global_rank(self, rank: int) -> int:
        return self._comm.global_rank(rank)

    @override
    def _reduce_in_place(self, values: torch.Tensor, op: Op, rank: int | None) -> None:
        self._comm._reduce_in_place(values, op, rank)

    @override
    def _broadcast_in_place(self, buffer: torch.Tensor, source: int) -> None:
        self._comm._broadcast_in_place(buffer, source)

    @override
    def _gather_bytes(self, buffer: torch.Tensor) -> list[bytes]:
        return self._comm._gather_bytes(buffer)

    @override
    def _swap_bytes(self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]) -> torch.Tensor:
        return self._comm._swap_bytes(sent, sent_sizes, sizes)


@contextmanager
def guarding(comm: Communicator) -> Iterator[Guarded]:
    """Run a body that communicates through what is yielded; if it raises on one rank, raise on all.

    Every rank must call it. Rounds of 64 bytes: one before each collective of the body, and one at the end.
    """
    ranks = Guarded(comm)
    try:
        yield ranks
    except BaseException as caught:
        ranks.meet(as_met(caught))
    ranks.meet()
