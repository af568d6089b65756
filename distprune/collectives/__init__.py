"""The only code that talks to other ranks: a process group, an MPI communicator, or alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias, Union

import torch.distributed as dist

from distprune.collectives.agree import (
    agree,
    check_facts,
    max_together,
    same_everywhere,
    sum_together,
    swap_known,
    swap_unknown,
    together,
)
from distprune.collectives.alone import Alone
from distprune.collectives.base import Communicator, Traffic, as_told, cannot_meet, has_lost_ranks, out_of_step
from distprune.collectives.guarded import Guarded, guarding
from distprune.collectives.known import Known, digest_of, new_word, told_by_all
from distprune.collectives.mpi import MpiRanks
from distprune.collectives.process_group import ProcessGroup
from distprune.collectives.roster import Layout, Member, Roster, natural_order, roster_of_all, roster_of_one
from distprune.collectives.slow import work_together
from distprune.collectives.tensors import (
    as_bytes,
    broadcast_tensor,
    exchange,
    from_bytes,
    gather_features,
    gather_pairwise,
    lookup_rows,
    placed_like,
    whole_tensor,
)

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Alone",
    "Communicator",
    "Group",
    "Guarded",
    "Known",
    "Layout",
    "Member",
    "MpiRanks",
    "ProcessGroup",
    "Roster",
    "Traffic",
    "agree",
    "as_bytes",
    "as_told",
    "broadcast_tensor",
    "cannot_meet",
    "check_facts",
    "communicator",
    "digest_of",
    "exchange",
    "from_bytes",
    "gather_features",
    "gather_pairwise",
    "guarding",
    "has_lost_ranks",
    "lookup_rows",
    "max_together",
    "natural_order",
    "new_word",
    "out_of_step",
    "placed_like",
    "roster_of_all",
    "roster_of_one",
    "same_everywhere",
    "sum_together",
    "swap_known",
    "swap_unknown",
    "together",
    "told_by_all",
    "whole_tensor",
    "work_together",
]

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
