"""Ranks of an MPI communicator (mpi4py); torch.distributed need not be initialized."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast, final

import torch
from typing_extensions import override

from distprune.collectives.base import Communicator, Op

if TYPE_CHECKING:
    from mpi4py import MPI


@cache
def _duplicate_of() -> int:
    """Return the key under which a communicator holds its duplicate; MPI calls what frees it."""
    from mpi4py import MPI

    return MPI.Comm.Create_keyval(delete_fn=lambda _comm, _key, duplicate: duplicate.Free())


@final
class MpiRanks(Communicator):
    """An ``mpi4py`` intracommunicator.

    Only buffer calls of the MPI standard are used (Allreduce, Reduce, Bcast, Allgather, Alltoallv), so any
    implementation serves. The communicator is duplicated once (collective), so that its messages never
    meet the caller's; the duplicate is freed with it.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        if comm.Get_attr(_duplicate_of()) is None:
            comm.Set_attr(_duplicate_of(), comm.Dup())
        self.comm = cast("MPI.Intracomm", comm.Get_attr(_duplicate_of()))
        super().__init__(self.comm.Get_rank(), self.comm.Get_size())

    @override
    def _reduce_in_place(self, values: torch.Tensor, op: Op, rank: int | None) -> None:
        from mpi4py import MPI

        staged, kind = values.cpu(), MPI.SUM if op == "sum" else MPI.MAX
        if rank is None:
            self.comm.Allreduce(MPI.IN_PLACE, staged.numpy(), op=kind)
        else:
            sent = MPI.IN_PLACE if self.rank == rank else staged.numpy()
            self.comm.Reduce(sent, staged.numpy(), op=kind, root=rank)
        if staged is not values:
            values.copy_(staged)

    @override
    def _broadcast_in_place(self, buffer: torch.Tensor, source: int) -> None:
        staged = buffer.cpu()
        self.comm.Bcast(staged.numpy(), root=source)
        if staged is not buffer:
            buffer.copy_(staged)

    @override
    def _gather_bytes(self, buffer: torch.Tensor) -> list[bytes]:
        gathered = torch.empty((self.size, buffer.numel()), dtype=torch.uint8, device="cpu")
        self.comm.Allgather(buffer.numpy(), gathered.numpy())
        return [bytes(part.numpy()) for part in gathered]

    @override
    def _swap_bytes(self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]) -> torch.Tensor:
        from mpi4py import MPI

        received = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        self.comm.Alltoallv([sent.cpu().numpy(), sent_sizes, MPI.BYTE], [received.numpy(), sizes, MPI.BYTE])
        return received.to(sent.device)
