"""Which parameters take part, in which order, and which ranks hold them.

Ranks of one group may hold different parameters (pipeline stages, experts on sub-meshes). The roster
is the one list all of them agree on; a parameter's index in it is its place in every ordering.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from distprune.collectives.base import Communicator


@dataclass(frozen=True)
class Member:
    """One parameter as a rank describes it."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Roster:
    """The agreed list. Member ``i`` was listed by ``num_holders[i]`` ranks, the lowest is ``first_holder[i]``."""

    members: tuple[Member, ...]
    first_holder: tuple[int, ...]
    num_holders: tuple[int, ...]

    def index(self) -> dict[str, int]:
        """Return the place of every name."""
        return {member.name: i for i, member in enumerate(self.members)}


def roster_of_one(comm: Communicator, members: Sequence[Member]) -> Roster:
    """Return the roster where every rank is known to hold this very list; nothing is communicated."""
    return dataclasses.replace(_merge([list(members)]), num_holders=(comm.size,) * len(members))


def roster_of_all(comm: Communicator, members: Sequence[Member]) -> Roster:
    """Return the union of all ranks' lists; every rank of ``comm`` must call it.

    The lists travel once (two rounds; bytes: ranks x the longest list as text). The order keeps every
    rank's own; where that leaves a choice, the name decides, with numbers read as numbers, so that the
    stages of a pipeline come out in the order of the whole model.

    Raises:
        ValueError: on every rank, when a name stands twice in one list, ranks give one name different
            shapes or dtypes, or list the same parameters in different orders.
    """
    lists = comm.gather([[member.name, list(member.global_shape), member.dtype] for member in members])
    # From here on every rank works on the same lists, so every rank raises the same error.
    return _merge([[Member(name, tuple(shape), dtype) for name, shape, dtype in entries] for entries in lists])


def _merge(lists: list[list[Member]]) -> Roster:
    known: dict[str, tuple[Member, int]] = {}
    num_holders: dict[str, int] = {}
    for rank, members in enumerate(lists):
        names = [member.name for member in members]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"rank {rank} lists parameter {twice!r} twice; give every parameter once")
        for member in members:
            num_holders[member.name] = num_holders.get(member.name, 0) + 1
            first, holder = known.setdefault(member.name, (member, rank))
            if first != member:
                raise ValueError(
                    f"ranks disagree on parameter {member.name!r}: {_describe(first)} on rank {holder}, "
                    f"{_describe(member)} on rank {rank}; ranks of one group must work on one model"
                )
    order = _merged_order([[member.name for member in members] for members in lists])
    return Roster(
        tuple(known[name][0] for name in order),
        tuple(known[name][1] for name in order),
        tuple(num_holders[name] for name in order),
    )


def _merged_order(lists: list[list[str]]) -> list[str]:
    """Topological merge (Kahn): of the names that no list still puts behind another, the smallest first."""
    sorter: TopologicalSorter[str] = TopologicalSorter({name: () for names in lists for name in names})
    for names in lists:
        for before, after in itertools.pairwise(names):
            sorter.add(after, before)
    try:
        sorter.prepare()
    except CycleError as error:
        stuck = sorted(set(error.args[1]), key=natural_order)
        raise ValueError(
            f"ranks list the same parameters in different orders, {stuck[:4]} among them; "
            "build the model and the list in the same way on every rank"
        ) from None
    ready: list[tuple[list[tuple[int, str]], str]] = []
    order: list[str] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, (natural_order(name), name))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that reads numbers as numbers: ``layers.2`` before ``layers.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _describe(member: Member) -> str:
    return f"{member.dtype} {list(member.global_shape)}"
