"""Zeros counted over ranks, and those found that nobody has pruned, before they are held."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence

import torch

from distprune.collectives import Communicator, Roster, max_together, sum_together
from distprune.shards import LocalShard, bits_of, count_zeros, fetched, flat_chunks


def num_zeros(comm: Communicator, roster: Roster, locals_: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, int]:
    """Return how many elements of each parameter are zero, over all ranks. Every rank must call it: one round."""

    def count(nums: torch.Tensor) -> None:
        tensors, place = locals_(), roster.index()
        for name, num in zip(tensors, count_zeros([*tensors.values()]), strict=True):
            nums[place[name]] = num

    nums: list[int] = sum_together(comm, (len(roster.members),), count).tolist()
    return {member.name: num for member, num in zip(roster.members, nums, strict=True)}


def check_zeros(comm: Communicator, roster: Roster, shards: Sequence[LocalShard]) -> None:
    """Check that every parameter can learn while its zeros are held.

    Every rank must call it: one round of 8 bytes a parameter, and one of 16 where matrices are mostly zeros. A warning
    names those whose other weights are all the same number: ``eye_`` and ``dirac_`` leave such, and pruning does not.

    Raises:
        ValueError: on every rank: a parameter is all zeros.
    """
    place, owned = roster.index(), [shard for shard in shards if shard.owned]
    num = num_zeros(comm, roster, lambda: {shard.name: shard.local for shard in owned})
    numels = {member.name: math.prod(member.global_shape) for member in roster.members}
    dead = [name for name, numel in numels.items() if num[name] == numel > 0]
    if dead:
        raise ValueError(
            f"{dead[0]!r} is all zeros ({len(dead)} such parameters): held, it could never learn; leave it out with "
            "exclude, or initialise it first"
        )
    sparse = {name for name, numel in numels.items() if 2 * num[name] > numel}
    if not sparse:
        return

    def measure(sizes: torch.Tensor) -> None:
        sizes[:] = torch.iinfo(torch.int64).min
        floats = [shard for shard in owned if shard.local.is_floating_point()]
        judged = [shard for shard in floats if shard.name in sparse and shard.local.numel()]
        for shard, extremes in zip(judged, fetched([_extremes(shard.local) for shard in judged]), strict=True):
            sizes[place[shard.name]] = extremes

    sizes = max_together(comm, (len(place), 2), measure).tolist()
    natural = [m.name for m, (largest, smallest) in zip(roster.members, sizes, strict=True) if largest == -smallest > 0]
    if natural:
        names = ", ".join(map(repr, natural[:4])) + (", ..." if len(natural) > 4 else "")
        warnings.warn(
            f"{names} ({len(natural)} parameters) are mostly zeros, and their other weights are all the same number: "
            "eye_ and dirac_ leave them so, pruning does not. Their zeros are held, and never learn: leave them out "
            "with exclude, or prune over time with SparseTraining, which holds nothing before its schedule starts",
            stacklevel=5,
        )


def _extremes(local: torch.Tensor) -> torch.Tensor:
    """Return the largest size of what is not zero, and minus the smallest, as integers of the same order. Local."""
    largest = [torch.zeros((), dtype=torch.int64, device=local.device)]
    smallest = [torch.full((), torch.iinfo(torch.int64).max, dtype=torch.int64, device=local.device)]
    for _, values in flat_chunks(local):
        bits = bits_of(values)
        sizes = (bits & torch.iinfo(bits.dtype).max).to(torch.int64)
        largest.append(sizes.max())
        smallest.append(sizes.masked_fill_(sizes == 0, torch.iinfo(torch.int64).max).min())
    return torch.stack([torch.stack(largest).max(), -torch.stack(smallest).min()])
