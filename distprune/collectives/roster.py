"""Which parameters take part, in which order, and which ranks hold them.

Ranks of one group may hold different parameters (pipeline stages, experts on sub-meshes). The roster
is the one list all of them agree on; a parameter's index in it is its place in every ordering.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter

from distprune.collectives.agree import check_facts, each_different, same_everywhere
from distprune.collectives.base import Communicator


@dataclass(frozen=True)
class Member:
    """One parameter as a rank describes it.

    ``layout``: which ranks hold which parts of it. If all its holders, ``num_ranks`` of them, state the same, their
    parts fit together. ``None``: nothing that ranks could compare says so. ``evidence``: a checksum of what was given
    of it whole, of which each rank takes its part.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    layout: Layout | None = field(default=None, compare=False)
    evidence: int = 0


@dataclass(frozen=True)
class Layout:
    """``name``: the same for equal layouts. ``num_ranks``: over how many ranks, ``None`` if each holds all of it.

    ``num_copies``: how many ranks hold the same elements.
    """

    name: str
    num_ranks: int | None
    num_copies: int


@dataclass(frozen=True)
class Roster:
    """The agreed list. Member ``i`` was listed by the ranks ``holders[i]``, ascending.

    ``num_copies[i]`` ranks hold the same elements of it, if the layout says that the parts of all fit together; else it
    is ``None``: then the ranks have to count. ``on_gpu``: what each rank holds lies on one GPU that has kernels.
    """

    members: tuple[Member, ...]
    holders: tuple[tuple[int, ...], ...]
    num_copies: tuple[int | None, ...]
    on_gpu: bool = False

    def index(self) -> dict[str, int]:
        """Return the place of every name."""
        return {member.name: i for i, member in enumerate(self.members)}


def agreed_roster(comm: Communicator, facts: Mapping[str, object], members: Sequence[Member]) -> Roster:
    """Return the roster of what the ranks hold, who all must state the same ``facts``. Every rank must call it.

    One round of 64 bytes if all ranks hold the same members, else those of ``check_facts`` and ``roster_of_all`` more.

    Raises:
        ValueError: on every rank: facts differ, or the lists of members do not fit together.
    """
    if same_everywhere(comm, [facts, [dataclasses.astuple(member) for member in members]])[0]:
        return roster_of_one(comm, members)
    check_facts(comm, facts)
    return roster_of_all(comm, members)


def roster_of_one(comm: Communicator, members: Sequence[Member], *, on_gpu: bool = False) -> Roster:
    """Return the roster where every rank is known to hold this very list; nothing is communicated."""
    _check_names(0, members)
    layouts = [member.layout for member in members]
    copies = {layout: _num_copies({layout}, comm.size) for layout in {*layouts}}
    num_copies = tuple([copies[layout] for layout in layouts])
    return Roster(tuple(members), (tuple(range(comm.size)),) * len(members), num_copies, on_gpu)


def roster_of_all(comm: Communicator, members: Sequence[Member], *, on_gpu: bool = False) -> Roster:
    """Return the union of all ranks' lists; every rank of ``comm`` must call it.

    Two rounds, those of ``each_different``. The order keeps every rank's own; where that leaves a choice, the name
    decides, with numbers read as numbers, so that the stages of a pipeline come out in the order of the whole model.

    Raises:
        ValueError: on every rank, when a name stands twice in one list, ranks give one name different
            shapes or dtypes, or list the same parameters in different orders.
    """
    told = each_different(comm, [dataclasses.astuple(member) for member in members])
    # From here on every rank works on the same lists, so every rank raises the same error.
    # By name: the numbers of the lists that have it, and what they say.
    stated: dict[str, list[tuple[int, Member]]] = {}
    names = []
    for i, (ranks, entries) in enumerate(told):
        listed = [
            Member(name, tuple(shape), dtype, None if layout is None else Layout(*layout), evidence)
            for name, shape, dtype, layout, evidence in entries
        ]
        _check_names(ranks[0], listed)
        names.append([member.name for member in listed])
        for member in listed:
            before = stated.setdefault(member.name, [(i, member)])
            first, other = before[0]
            if member != other:
                raise _disagreement((told[first][0][0], other), (ranks[0], member))
            if first != i:
                before.append((i, member))
    holders_of = cache(lambda *which: tuple(sorted([rank for i in which for rank in told[i][0]])))  # lists share them
    members, holders, num_copies = [], [], []
    for name in _merged_order(names):
        which, of_lists = zip(*stated[name], strict=True)
        members.append(of_lists[0])
        holders.append(holders_of(*which))
        num_copies.append(_num_copies({member.layout for member in of_lists}, len(holders[-1])))
    return Roster(tuple(members), tuple(holders), tuple(num_copies), on_gpu)


def _check_names(rank: int, members: Sequence[Member]) -> None:
    if len({member.name for member in members}) != len(members):
        twice = Counter(member.name for member in members).most_common(1)[0][0]
        raise ValueError(f"rank {rank} lists parameter {twice!r} twice; give every parameter once")


def _disagreement(one: tuple[int, Member], two: tuple[int, Member]) -> ValueError:
    (rank, member), (other_rank, other) = one, two
    if dataclasses.replace(member, evidence=other.evidence) == other:
        return ValueError(
            f"the evidence of {member.name!r} that was given whole differs between ranks {rank} and {other_rank}; "
            "give the same on every rank, or each its part as a DTensor"
        )
    shown = [f"{of_rank.dtype} {list(of_rank.global_shape)}" for of_rank in (member, other)]
    return ValueError(
        f"ranks disagree on parameter {member.name!r}: {shown[0]} on rank {rank}, {shown[1]} on rank {other_rank}; "
        "ranks of one group must work on one model"
    )


def _num_copies(layouts: Set[Layout | None], num_holders: int) -> int | None:
    """Return how many ranks hold the same elements; ``None``: holders do not all state the same layout."""
    layout = next(iter(layouts))
    if layout is None or len(layouts) > 1 or layout.num_ranks not in (None, num_holders):
        return None
    return num_holders if layout.num_ranks is None else layout.num_copies


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
