"""The only code that talks to other ranks: a process group, an MPI communicator, or alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias, Union

import torch.distributed as dist

from distprune.collectives.alone import Alone
from distprune.collectives.base import Communicator
from distprune.collectives.mpi import MpiRanks
from distprune.collectives.process_group import ProcessGroup

if TYPE_CHECKING:
    from mpi4py import MPI


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
        return ProcessGroup() if dist.is_available() and dist.is_initialized() else Alone()
    if isinstance(group, dist.ProcessGroup):
        return ProcessGroup(group)
    mpi = sys.modules.get("mpi4py.MPI")  # an Intracomm exists only if its caller imported it
    if mpi is not None and isinstance(group, mpi.Intracomm):
        return MpiRanks(group)
    raise TypeError(
        f"group must be a torch.distributed.ProcessGroup, an mpi4py.MPI.Intracomm, a Communicator or None, "
        f"not {type(group).__name__}"
    )
