"""Whether the ranks' shards fit together, and how much was pruned before: the first round of a choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from distprune.collectives import Communicator, Roster, sum_together
from distprune.patterns.base import Ranked
from distprune.scores import LocalScores
from distprune.shards import Geometry, LocalShard, checksum, count_zeros, fetched

_Part = tuple[LocalShard, Sequence[torch.Tensor]]  # and what of it is read


def take_census(
    ranked: Ranked, *, counts_gone: bool = False, num_cut: Callable[[LocalScores], int] | None = None
) -> tuple[list[int], list[int]]:
    """Return by member, over all ranks, how many elements were pruned before, and how many shard edges cut.

    Elements, or blocks, are cut off from the others of their group, row or block; ``num_cut`` counts them. Every rank
    must call it. One round of 16 bytes a parameter, and 8 more for each of the two counts; what is not counted is 0.

    Raises:
        ValueError: on every rank: replicas differ, or an element is owned by no rank or by several.
    """

    def count(words: torch.Tensor) -> None:
        if counts_gone:
            gone = {member: scores.gone for member, scores in ranked.owned.items() if scores.gone is not None}
            for member, num in zip(gone, count_zeros([*gone.values()]), strict=True):
                words[member, 0] = num
        if num_cut is not None:
            for scores in ranked.scores:
                words[ranked.index[scores.shard.name], -1] = num_cut(scores)

    def parts() -> list[_Part]:
        return [(scores.shard, scores.reads) for scores in ranked.scores]

    counts = _checked(ranked.comm, ranked.roster, parts, counts_gone + (num_cut is not None), count).T.tolist()
    none = [0] * len(ranked.numels)
    return counts[0] if counts_gone else none, none if num_cut is None else counts[-1]


def check_parts(comm: Communicator, roster: Roster, shards: Callable[[], Sequence[LocalShard]]) -> None:
    """Check that the ranks' ``shards`` fit together. Every rank must call it: one round of 16 bytes a parameter.

    Raises:
        ValueError: on every rank: replicas differ, an element is owned by no rank or by several, or a rank has no
            values of its part yet.
    """
    _checked(comm, roster, lambda: [(shard, [shard.local]) for shard in shards()])


def _checked(
    comm: Communicator,
    roster: Roster,
    parts: Callable[[], Sequence[_Part]],
    num_counts: int = 0,
    count: Callable[[torch.Tensor], None] = lambda _: None,
) -> torch.Tensor:
    """Check the ranks' ``parts``; return the sum of ``count``, of the same round."""
    index = roster.index()

    def fill(words: torch.Tensor) -> None:
        found = parts()
        for shard, _ in found:
            if shard.local.is_meta:
                raise ValueError(f"{shard.name!r} has no values on this rank (meta): prune when all ranks have them")
            if shard.owned:
                words[index[shard.name], 0] = shard.geometry.fingerprint()
        copied = [(shard, checksum(reads)) for shard, reads in found if shard.num_replicas != 1]
        for (shard, _), of_reads in zip(copied, fetched([number for _, number in copied]), strict=True):
            # The owner's checksum, once for every copy, less the copies': zero if all are equal. As int64, which wraps.
            words[index[shard.name], 1] = of_reads * (shard.num_replicas - 1 if shard.owned else -1)
        count(words[:, 2:])

    words = sum_together(comm, (len(roster.members), 2 + num_counts), fill)
    for i, member in enumerate(roster.members):
        if (int(words[i, 0]) - Geometry.whole(member.global_shape).fingerprint()) % Geometry.PRIME == 0:
            continue

        def num_owned(owned: torch.Tensor, name: str = member.name) -> None:
            owned[0] = sum(shard.geometry.local_numel for shard, _ in parts() if shard.owned and shard.name == name)

        num, numel = int(sum_together(comm, (1,), num_owned)), math.prod(member.global_shape)
        overlap = ", some of them twice" if num == numel else ""
        raise ValueError(
            f"of the {numel} elements of {member.name!r} the ranks own {num}{overlap}: every element must be "
            "owned by exactly one rank; pass a group of all ranks that hold a part, and give copies the same layout"
        )
    for i, member in enumerate(roster.members):
        if int(words[i, 1]):
            raise ValueError(
                f"ranks that should hold the same values of {member.name!r} hold different ones; make the replicas "
                "equal, or, for pipeline stages, give parameters different names or pass the stage's own group"
            )
    return words[:, 2:]
