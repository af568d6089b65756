"""Which ranks have whole layers, so that these need not be sent to be worked on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from distprune.collectives.agree import max_together
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import LinearLayer, expert_place
from distprune.shards.geometry import Geometry
from distprune.shards.layouts import local_shard


def find_holders(comm: Communicator, linears: Mapping[str, LinearLayer]) -> Sequence[Collection[int]]:
    """Return for each of ``linears`` the first and the last of the ranks that hold all of it; none if all ranks do.

    Nor if no rank does. Every rank must call it: one round of 16 bytes a layer.
    """

    def tell(words: torch.Tensor) -> None:
        held = _held(linears)
        first = [-comm.rank if is_held else -comm.size for is_held in held]
        last = [comm.rank if is_held else -1 for is_held in held]
        words.copy_(torch.tensor([first, last], dtype=torch.int64, device="cpu"))

    less_firsts, lasts = max_together(comm, (2, len(linears)), tell).tolist()
    everywhere = {0, comm.size - 1}
    found = [{-first, last} if last >= 0 else set() for first, last in zip(less_firsts, lasts, strict=True)]
    return [set() if holders == everywhere else holders for holders in found]


def _held(linears: Mapping[str, LinearLayer]) -> list[bool]:
    """Return which of ``linears`` are whole on this rank. Local."""
    geometries: dict[str, Geometry] = {}
    held: list[bool] = []
    for linear in linears.values():
        path = linear.parameter_path
        if path not in geometries:
            geometries[path] = local_shard(path, linear.parameter).geometry
        geometry, num_before = geometries[path], 0 if linear.expert is None else 1
        dims = list(zip(geometry.dim_runs, geometry.global_shape, strict=True))
        is_here = linear.expert is None or expert_place(dims[0][0], linear.expert) is not None
        held.append(is_here and all(runs == ((0, size),) for runs, size in dims[num_before:]))
    return held
