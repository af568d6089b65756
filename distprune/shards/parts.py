"""The parts of parameters: who owns them, whether ranks' fit together, and whether each has memory of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.collectives.roster import Roster
from distprune.shards.checksum import checksum
from distprune.shards.device import fetched
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, no_values


def with_owners(comm: Communicator, roster: Roster, shards: Iterable[LocalShard]) -> list[LocalShard]:
    """Return this rank's ``shards`` of members of ``roster``, with their owners settled. Local."""
    holders, settled = dict(zip(roster.index(), roster.holders, strict=True)), []
    global_rank = cache(comm.global_rank)
    for shard in shards:
        ranks = holders[shard.name]
        settled.append(shard.owned_by(global_rank(comm.rank), global_rank(ranks[0]), len(ranks)))
    return settled


def check_memory(shards: Sequence[LocalShard]) -> None:
    """Check that what is written to one of this rank's ``shards`` is written to no other place. Local, no wait.

    Raises:
        ValueError: elements share memory, or torch reads values otherwise than they are stored.
    """
    ranges: list[tuple[int, int, int, LocalShard]] = []  # device, from, to
    for shard in shards:
        local = shard.local
        if local.is_neg() or local.is_conj():
            raise ValueError(
                f"{shard.name!r} is a negated or conjugated view of its memory, which is not written to: give the "
                "module weight.detach().resolve_neg().resolve_conj() as a parameter"
            )
        start, numel = local.data_ptr(), local.numel()
        if not start or not numel:  # it has no memory
            continue
        is_contiguous = local.is_contiguous()
        if not is_contiguous and _overlaps_itself(local):
            raise ValueError(
                f"elements of {shard.name!r} share memory, as in an expanded tensor: give the module weight.detach()"
                ".contiguous().clone() as a parameter"
            )
        reach = numel if is_contiguous else _last(local) + 1
        ranges.append((local.get_device(), start, start + reach * local.itemsize, shard))
    ranges.sort(key=lambda place: place[:3])
    behind: list[tuple[int, int, int, LocalShard]] = []  # what may reach into the next one
    for place in ranges:
        behind = [before for before in behind if before[0] == place[0] and before[2] > place[1]]
        for *_, other in behind:
            if _share_memory(other.local, place[3].local):
                raise ValueError(
                    f"{other.name!r} and {place[3].name!r} share memory, and are two parameters: tie them (one module "
                    "is given the other's parameter), or give one a clone of its values"
                )
        behind.append(place)


def _last(tensor: torch.Tensor) -> int:
    """Return how far behind the first element the last one is."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    reach = 0  # of the dims with shorter strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors, whose ranges of memory overlap, share an element: columns of one matrix do not."""
    offset, rest = divmod(other.data_ptr() - one.data_ptr(), one.itemsize)
    if (one.is_contiguous() and other.is_contiguous()) or one.itemsize != other.itemsize or rest:
        return True
    written = torch.zeros(max(_last(one), offset + _last(other)) + 1, dtype=torch.bool, device="cpu")
    written.as_strided(one.shape, one.stride()).fill_(True)
    return bool(written.as_strided(other.shape, other.stride(), offset).any())


def check_parts(
    comm: Communicator,
    roster: Roster,
    shards: Callable[[], Sequence[LocalShard]],
    reads: Callable[[], Sequence[Sequence[torch.Tensor]]] | None = None,
    num_counts: int = 0,
    count: Callable[[torch.Tensor], object] = len,
) -> torch.Tensor:
    """Check that the ranks' ``shards`` fit together. Every rank must call it: one round.

    It has 8 bytes for every parameter of which there are copies, and 16 for those whose layout does not say that the
    ranks' parts fit together (FSDP1, rows spread by hand).

    ``reads``: what replicas must have alike; by default the values. Return the sum of what ``count`` writes, (members,
    ``num_counts``), of the same round.

    Raises:
        ValueError: on every rank: replicas differ, an element is owned by no rank or by several, or a rank has no
            values of its part yet.
    """
    members, index = roster.members, roster.index()
    counted = {i: place for place, i in enumerate(i for i, num in enumerate(roster.num_copies) if num is None)}
    copied = {i: place for place, i in enumerate(i for i, num in enumerate(roster.num_copies) if num != 1)}
    sizes = [len(counted), len(copied), len(members) * num_counts]

    def fill(words: torch.Tensor) -> None:
        fingerprints, checksums, counts = torch.split(words, sizes)
        local = shards()
        for shard in local:
            if shard.local.is_meta:
                raise no_values(shard.name)
            if shard.owned and index[shard.name] in counted:
                fingerprints[counted[index[shard.name]]] = shard.geometry.fingerprint()
        tensors = [[shard.local] for shard in local] if reads is None or not copied else reads()
        copies = [both for both in zip(local, tensors, strict=True) if both[0].num_replicas != 1]
        numbers = fetched([checksum(of_shard) for _, of_shard in copies])
        for (shard, _), number in zip(copies, numbers, strict=True):
            # The owner's checksum, once for every copy, less the copies': zero if all are equal. As int64, which wraps.
            checksums[copied[index[shard.name]]] = number * (shard.num_replicas - 1 if shard.owned else -1)
        count(counts.view(len(members), num_counts))

    fingerprints, checksums, counts = torch.split(sum_together(comm, (sum(sizes),), fill), sizes)
    for member, number in zip(counted, fingerprints.tolist(), strict=True):
        whole = members[member]
        if (number - Geometry.whole(whole.global_shape).fingerprint()) % Geometry.PRIME == 0:
            continue

        def num_owned(owned: torch.Tensor, name: str = whole.name) -> None:
            owned[0] = sum(shard.geometry.local_numel for shard in shards() if shard.owned and shard.name == name)

        num, numel = int(sum_together(comm, (1,), num_owned)), math.prod(whole.global_shape)
        overlap = ", some of them twice" if num == numel else ""
        raise ValueError(
            f"of the {numel} elements of {whole.name!r} the ranks own {num}{overlap}: every element must be "
            "owned by exactly one rank; pass a group of all ranks that hold a part, and give copies the same layout"
        )
    for member, number in zip(copied, checksums.tolist(), strict=True):
        if number:
            raise ValueError(
                f"ranks that should hold the same values of {members[member].name!r} hold different ones; make the "
                "replicas equal, or, for pipeline stages, give parameters different names or pass the stage's own group"
            )
    return counts.view(len(members), num_counts)
