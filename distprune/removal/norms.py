"""Sums of squares of all weights that leave with a unit: the same bits in every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from distprune.collectives.agree import max_together, sum_together
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import expert_place
from distprune.models.units import Cut, Units
from distprune.scores.exact_sum import grid_scale, on_grid
from distprune.shards.device import are_finite
from distprune.shards.geometry import indices_of
from distprune.shards.local_shard import LocalShard

_CHUNK = 1 << 20  # weights in float64 at a time


def unit_norms(
    comm: Communicator, asked: Sequence[tuple[str, Units]], shards: Mapping[str, LocalShard]
) -> list[torch.Tensor]:
    """Return the sum of squares of each unit's weights, (num_units,) float64, for each (block's name, units).

    ``shards``: this rank's part of every parameter that is cut, by name, owners settled. Every rank must call it: 2
    rounds, of 8 bytes and of 8 bytes a unit.

    Raises:
        ValueError: on every rank: weights are NaN or infinite.
    """
    num_addends = max(
        sum(_num_weights(shards[f"{block}.{cut.parameter}"], cut) for cut in of.cuts) for block, of in asked
    )

    def look(largest: torch.Tensor) -> None:
        for shard in shards.values():
            if shard.local.numel():
                largest[0] = max(float(largest[0]), float(shard.local.abs().max()))
                if not are_finite(shard.local):
                    raise ValueError(f"weights of {shard.name!r} are NaN or infinite")

    largest = float(max_together(comm, (1,), look, torch.float64)[0])
    scale = grid_scale(num_addends, largest**2)
    sizes = [of.num_units for _, of in asked]

    def fill(words: torch.Tensor) -> None:
        for part, (block, of) in zip(torch.split(words, sizes), asked, strict=True):
            for cut in of.cuts:
                shard = shards[f"{block}.{cut.parameter}"]
                if shard.owned:
                    part += _sums(shard, cut, scale)[cut.index].sum(dim=1)

    words = sum_together(comm, (sum(sizes),), fill)
    exponent = torch.tensor(-scale, dtype=torch.float64, device="cpu")
    return [torch.ldexp(part.double(), exponent) for part in torch.split(words, sizes)]


def _num_weights(shard: LocalShard, cut: Cut) -> int:
    """Return how many weights of the parameter leave with one unit."""
    others = shard.geometry.global_numel // shard.shape[cut.dim] // (1 if cut.expert is None else shard.shape[0])
    return cut.index.shape[1] * others


def _sums(shard: LocalShard, cut: Cut, scale: int) -> torch.Tensor:
    """Return the sums of squares of this rank's weights by their index along the cut's dim, (size,) int64."""
    local, places = shard.local, indices_of(shard.geometry.dim_runs[cut.dim])
    sums = torch.zeros(shard.shape[cut.dim], dtype=torch.int64, device="cpu")
    if cut.expert is not None:
        if (place := expert_place(shard.geometry.dim_runs[0], cut.expert)) is None:
            return sums
        local = local.narrow(0, place, 1)
    local = local.movedim(cut.dim, 0)
    step = max(1, _CHUNK // max(local[:1].numel(), 1))
    for some, values in zip(torch.split(places, step), torch.split(local, step), strict=True) if len(places) else ():
        squares = on_grid(values.double().square(), scale)
        sums[some] = squares.reshape(len(some), -1).sum(dim=1).cpu()
    return sums
