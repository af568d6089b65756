"""Whether the ranks' shards fit together, and how much was pruned before: the first round of a choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from distprune.collectives import Communicator, Roster, sum_together
from distprune.scores import LocalScores
from distprune.shards import Geometry, LocalShard, checksum, count_zeros, fetched

__all__ = ["Census", "check_parts", "take_census"]


@dataclass(frozen=True)
class Census:
    """Counts by member, over all ranks.

    ``num_gone``: elements pruned before. ``num_cut``: elements, or blocks, that shard edges cut off from the others of
    their group, row or block.
    """

    num_gone: list[int]
    num_cut: list[int]


def take_census(
    comm: Communicator,
    roster: Roster,
    scores: Callable[[], Sequence[LocalScores]],
    *,
    counts_gone: bool,
    num_cut: Callable[[LocalScores], int] | None = None,
) -> Census:
    """Return the census of all ranks' ``scores``. Every rank must call it.

    ``counts_gone``: count what is gone. ``num_cut``: counts what is cut. One round of 16 bytes a parameter, and 8 more
    for each of the two counts.

    Raises:
        ValueError: on every rank: replicas differ, or an element is owned by no rank or by several.
    """
    place = roster.index()

    def fill(words: torch.Tensor) -> None:
        _fill_parts(words, place, [(of_shard.shard, of_shard.reads) for of_shard in scores()])
        if counts_gone:
            gone = {s.shard.name: s.gone for s in scores() if s.shard.owned and s.gone is not None}
            for name, num in zip(gone, count_zeros([*gone.values()]), strict=True):
                words[place[name], 2] = num
        if num_cut is not None:
            for of_shard in scores():
                words[place[of_shard.shard.name], -1] = num_cut(of_shard)

    num_words = 2 + counts_gone + (num_cut is not None)
    words = sum_together(comm, (len(roster.members), num_words), fill)
    _check(comm, roster, words, lambda: [of_shard.shard for of_shard in scores()])
    none = [0] * len(roster.members)
    return Census(words[:, 2].tolist() if counts_gone else none, none if num_cut is None else words[:, -1].tolist())


def check_parts(comm: Communicator, roster: Roster, shards: Callable[[], Sequence[LocalShard]]) -> None:
    """Check that the ranks' ``shards`` fit together. Every rank must call it: one round of 16 bytes a parameter.

    Raises:
        ValueError: on every rank: replicas differ, or an element is owned by no rank or by several.
    """
    place = roster.index()

    def fill(words: torch.Tensor) -> None:
        _fill_parts(words, place, [(shard, [shard.local]) for shard in shards()])

    _check(comm, roster, sum_together(comm, (len(roster.members), 2), fill), shards)


def _fill_parts(
    words: torch.Tensor, place: Mapping[str, int], parts: Sequence[tuple[LocalShard, Sequence[torch.Tensor]]]
) -> None:
    """Say where each shard's elements are, and how far the replicas of what is read differ."""
    for shard, _ in parts:
        if shard.owned:
            words[place[shard.name], 0] = shard.geometry.fingerprint()
    copied = [(shard, checksum(reads)) for shard, reads in parts if shard.num_replicas != 1]
    for (shard, _), of_reads in zip(copied, fetched([number for _, number in copied]), strict=True):
        # The owner's checksum, once for every copy, less the copies': zero if all are equal. As int64, which wraps.
        words[place[shard.name], 1] = of_reads * ((shard.num_replicas or 1) - 1 if shard.owned else -1)


def _check(comm: Communicator, roster: Roster, words: torch.Tensor, shards: Callable[[], Sequence[LocalShard]]) -> None:
    wrong = [
        i
        for i, member in enumerate(roster.members)
        if (int(words[i, 0]) - Geometry.whole(member.global_shape).fingerprint()) % Geometry.PRIME
    ]
    if wrong:
        place = roster.index()

        def fill(owned: torch.Tensor) -> None:
            for shard in shards():
                owned[place[shard.name]] = shard.geometry.local_numel if shard.owned else 0

        member, num = roster.members[wrong[0]], sum_together(comm, (len(roster.members),), fill)[wrong[0]]
        numel = math.prod(member.global_shape)
        overlap = ", some of them twice" if int(num) == numel else ""
        raise ValueError(
            f"of the {numel} elements of {member.name!r} the ranks own {int(num)}{overlap}: every element must be "
            "owned by exactly one rank; pass a group of all ranks that hold a part, and give copies the same layout"
        )
    for i, member in enumerate(roster.members):
        if int(words[i, 1]):
            raise ValueError(
                f"ranks that should hold the same values of {member.name!r} hold different ones; make the replicas "
                "equal, or, for pipeline stages, give parameters different names or pass the stage's own group"
            )
