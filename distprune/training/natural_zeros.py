"""Zeros that nobody has pruned, found before they are held."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch

from distprune.collectives.agree import max_together
from distprune.collectives.base import Communicator
from distprune.collectives.roster import Roster
from distprune.pruning.agreement import sum_zeros
from distprune.shards.device import fetched
from distprune.shards.local_shard import LocalShard, flat_chunks


def check_zeros(comm: Communicator, roster: Roster, find: Callable[[], Sequence[LocalShard]]) -> None:
    """Check that every parameter can learn while its zeros are held.

    ``find`` returns this rank's shards. Every rank must call it: one round of 8 bytes a parameter, and one of 16
    where matrices are mostly zeros. A warning names those whose other weights are all the same number: ``eye_`` and
    ``dirac_`` leave such, and pruning does not.

    Raises:
        ValueError: on every rank: a parameter is all zeros.
    """
    owned: dict[str, torch.Tensor] = {}

    def look() -> dict[str, torch.Tensor]:
        owned.update({shard.name: shard.local for shard in find() if shard.owned and not shard.local.is_meta})
        return owned

    num = sum_zeros(comm, roster, look)
    numels = {member.name: math.prod(member.global_shape) for member in roster.members}
    dead = [name for name, numel in numels.items() if num[name] == numel > 0]
    if dead:
        raise ValueError(
            f"{dead[0]!r} is all zeros ({len(dead)} such parameters): held, it could never learn; leave it out with "
            "exclude, or initialise it first"
        )
    matrices = [member.name for member in roster.members if len(member.global_shape) > 1]
    sparse = [name for name in matrices if numels[name] / 2 < num[name] < numels[name] - 1]
    if not sparse:
        return
    place = {name: i for i, name in enumerate(sparse)}

    def measure(sizes: torch.Tensor) -> None:
        sizes.fill_(-torch.inf)
        judged = [name for name in sparse if name in owned and not owned[name].is_complex()]
        for name, extremes in zip(judged, fetched([_extremes(owned[name]) for name in judged]), strict=True):
            sizes[place[name]] = extremes

    sizes = max_together(comm, (len(sparse), 2), measure, torch.float64).tolist()
    natural = [name for name, (largest, smallest) in zip(sparse, sizes, strict=True) if largest == -smallest]
    if natural:
        names = ", ".join(map(repr, natural[:4])) + (", ..." if len(natural) > 4 else "")
        warnings.warn(
            f"{names} ({len(natural)} parameters) are mostly zeros, and their other weights are all the same number: "
            "eye_ and dirac_ leave them so, pruning does not. Their zeros are held, and never learn: leave them out "
            "with exclude, or prune over time with SparseTraining, which holds nothing before its schedule starts",
            stacklevel=5,
        )


def _extremes(local: torch.Tensor) -> torch.Tensor:
    """Return the largest size of what is not zero, and minus the smallest, float64; -inf where there is none. Local."""
    extremes = torch.full((2,), -torch.inf, dtype=torch.float64, device=local.device)
    for _, values in flat_chunks(local):
        sizes = values.to(torch.float64).abs()
        both = torch.stack([sizes, -sizes]).masked_fill(sizes == 0, -torch.inf)
        extremes = torch.maximum(extremes, both.flatten(1).amax(dim=1))
    return extremes
