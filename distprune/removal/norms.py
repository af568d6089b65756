"""Sums of squares of all weights that leave with a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import expert_place
from distprune.models.units import Cut, Units
from distprune.shards.device import fetched
from distprune.shards.geometry import indices_of
from distprune.shards.local_shard import LocalShard


def unit_norms(
    comm: Communicator, asked: Sequence[tuple[str, Units]], shards: Mapping[str, LocalShard]
) -> list[torch.Tensor]:
    """Return the sum of squares of each unit's weights, (num_units,) float64, for each (block's name, units).

    ``shards``: this rank's part of every parameter that is cut, by name, owners settled. Every rank must call it: a
    round of 8 bytes a unit.
    """
    sizes = [units.num_units for _, units in asked]
    cuts = [
        (number, cut, shard)
        for number, (block, units) in enumerate(asked)
        for cut in units.cuts
        if (shard := shards[f"{block}.{cut.parameter}"]).owned and shard.local.numel()
    ]

    def fill(words: torch.Tensor) -> None:
        parts = torch.split(words, sizes)
        all_squares = fetched([_squares(shard, cut) for _, cut, shard in cuts])
        for (number, cut, shard), squares in zip(cuts, all_squares, strict=True):
            by_place = torch.zeros(shard.shape[cut.dim], dtype=torch.float64, device="cpu")
            by_place[indices_of(shard.geometry.dim_runs[cut.dim])] = squares
            parts[number].add_(by_place[cut.index].sum(dim=1))

    return list(torch.split(sum_together(comm, (sum(sizes),), fill, torch.float64), sizes))


def _squares(shard: LocalShard, cut: Cut) -> torch.Tensor:
    """Return the sums of squares of this rank's weights by their place along the cut's dim, float64."""
    local = shard.local
    if cut.expert is not None:
        place = expert_place(shard.geometry.dim_runs[0], cut.expert)
        local = local.new_zeros((1, *local.shape[1:])) if place is None else local.narrow(0, place, 1)
    by_place = local.movedim(cut.dim, 0).reshape(local.shape[cut.dim], -1)
    norms: torch.Tensor = torch.linalg.vector_norm(by_place, dim=1, dtype=torch.float64)
    return norms.square()
