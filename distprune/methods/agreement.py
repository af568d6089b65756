"""What all ranks must say alike before anything is computed, and who owns what then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distprune.collectives import (
    Communicator,
    Member,
    Roster,
    agree,
    roster_of_all,
    roster_of_one,
    same_everywhere,
)
from distprune.shards import LocalShard

__all__ = ["agree_on", "draw_seed", "settle_owners"]


def agree_on(
    comm: Communicator,
    shards: Sequence[LocalShard],
    facts: Mapping[str, object],
    error: Exception | None = None,
    counts: Sequence[int] = (),
) -> tuple[Roster, list[int]]:
    """Return the roster of all parameters and the ``counts`` over ranks, or raise on all ranks.

    One round of 72 bytes where all ranks say the same; ``counts`` are then those of one rank. Where
    ranks hold different parameters (pipeline stages) their lists travel once and the counts are summed:
    up to four rounds more.

    Raises:
        Exception: ``error``, where it arose, and elsewhere the same built-in type naming the rank.
        ValueError: on every rank: facts differ, or the lists of parameters do not fit together.
    """
    members = [Member(s.name, s.geometry.global_shape, str(s.local.dtype)) for s in shards]
    described = [[m.name, list(m.global_shape), m.dtype] for m in members]
    said = [facts, list(counts), described]
    if same_everywhere(comm, said, error):
        return roster_of_one(comm, members), list(counts)
    agree(comm, facts)
    roster = roster_of_all(comm, members)
    return roster, comm.sum(torch.tensor(counts, dtype=torch.int64)).tolist()


def draw_seed(comm: Communicator) -> int:
    """Return a seed that the first rank draws from torch's default generator; every rank must call it: one round."""
    drawn = torch.randint(1 << 62, (1,)) if comm.rank == 0 else torch.zeros(1, dtype=torch.int64)
    return int(comm.sum(drawn)[0])


def settle_owners(comm: Communicator, shards: Sequence[LocalShard], roster: Roster) -> list[LocalShard]:
    """Return the shards with their owners settled. No communication."""
    place = roster.index()
    own_rank = comm.global_rank(comm.rank)
    return [
        shard.owned_by(own_rank, comm.global_rank(roster.first_holder[i]), roster.num_holders[i])
        for shard, i in ((shard, place[shard.name]) for shard in shards)
    ]
