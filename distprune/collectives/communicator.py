"""The only code that talks to other ranks: a process group, an MPI communicator, or alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias, Union, final

import torch
import torch.distributed as dist
from typing_extensions import override

from distprune.collectives.base import Communicator, Op
from distprune.collectives.mpi import MpiRanks

if TYPE_CHECKING:
    from mpi4py import MPI


@final
class ProcessGroup(Communicator):
    """A ``torch.distributed`` group; ``None`` is the default group.

    Messages are staged on the device the group's backend works on: the CPU where the group has a CPU
    backend (gloo, mpi, or ``"cpu:gloo,cuda:nccl"``); otherwise (nccl, xccl) the device that the group was bound to by
    ``init_process_group(device_id=...)``, else the current accelerator. Of what comes back the host waits for one copy.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized; call init_process_group first")
        resolved = group if group is not None else dist.group.WORLD
        rank = dist.get_rank(resolved)
        if resolved is None or rank < 0:
            raise ValueError("this rank is not a member of the group it was given; call on members only")
        super().__init__(rank, dist.get_world_size(resolved))
        self.group = resolved
        self.device = staging_device(resolved)

    @override
    def __reduce__(self) -> tuple[type[ProcessGroup], tuple[()]]:
        if self.group is not dist.group.WORLD:
            raise TypeError("a process group cannot be pickled, but for the default one; pickle what was made without")
        return ProcessGroup, ()

    @override
    def global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    @override
    def _reduce_in_place(self, values: torch.Tensor, op: Op, rank: int | None) -> None:
        staged, kind = self._staged(values), dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        if rank is None:
            dist.all_reduce(staged, op=kind, group=self.group)
        else:
            dist.reduce(staged, dst=self.global_rank(rank), op=kind, group=self.group)
        if staged is not values:
            values.copy_(staged)

    @override
    def _broadcast_in_place(self, buffer: torch.Tensor, source: int) -> None:
        staged = self._staged(buffer)
        dist.broadcast(staged, src=self.global_rank(source), group=self.group)
        if staged is not buffer and self.rank != source:
            buffer.copy_(staged)

    @override
    def _gather_bytes(self, buffer: torch.Tensor) -> list[bytes]:
        staged = self._staged(buffer)
        gathered = staged.new_empty((self.size, len(staged)))
        dist.all_gather(list(gathered), staged, group=self.group)  # into one tensor has another name in every torch
        return [bytes(part.numpy()) for part in gathered.cpu()]

    @override
    def _swap_bytes(self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]) -> torch.Tensor:
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(received, self._staged(sent), sizes, sent_sizes, group=self.group)
        return received.to(sent.device)

    def _staged(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` where the backend works; nobody waits for a copy from the CPU."""
        return values.to(self.device, non_blocking=values.device.type == "cpu")


def staging_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which messages of ``group`` are staged."""
    config = str(dist.get_backend_config(group))  # "cpu:gloo,cuda:nccl", or "cuda:nccl", or "cpu:threaded,..."
    if "cpu:" in config or ":" not in config:
        return torch.device("cpu")
    device_type = config.split(":")[0]
    bound: torch.device | None = group.bound_device_id
    if bound is not None and bound.type == device_type:
        return bound
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


@final
class Alone(Communicator):
    """A group of one. Counts the rounds it would have taken part in, so that figures compare."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    @override
    def _reduce_in_place(self, values: torch.Tensor, op: Op, rank: int | None) -> None:
        pass

    @override
    def _broadcast_in_place(self, buffer: torch.Tensor, source: int) -> None:
        pass

    @override
    def _gather_bytes(self, buffer: torch.Tensor) -> list[bytes]:
        return [bytes(buffer.numpy())]

    @override
    def _swap_bytes(self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]) -> torch.Tensor:
        return sent


Group: TypeAlias = Union["dist.ProcessGroup", "MPI.Intracomm", Communicator, None]


def communicator(group: Group = None) -> Communicator:
    """Return the communicator for ``group``.

    ``None`` is the default process group where torch.distributed is initialized, and this process
    alone where it is not. Nothing is communicated, except that an MPI communicator is duplicated the first time, which
    all its ranks must take part in.

    Raises:
        TypeError: ``group`` is none of these.
    """
    if isinstance(group, Communicator):
        return group
    if group is None:
        return ProcessGroup() if dist.is_initialized() else Alone()
    if isinstance(group, dist.ProcessGroup):
        return ProcessGroup(group)
    mpi = sys.modules.get("mpi4py.MPI")  # an Intracomm exists only if its caller imported it
    if mpi is not None and isinstance(group, mpi.Intracomm):
        return MpiRanks(group)
    raise TypeError(
        f"group must be a torch.distributed.ProcessGroup, an mpi4py.MPI.Intracomm, a Communicator or None, "
        f"not {type(group).__name__}"
    )
