"""Which rank factors X^T X of an input, its *owner*: ranks in turn, and of an expert one that holds it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from distprune.collectives.agree import max_together
from distprune.collectives.base import Communicator
from distprune.models.linear_layers import LinearLayer, expert_place
from distprune.shards.layouts import local_shard


@dataclass(frozen=True)
class SharedInput:
    """What the layers ``names`` are given: ``num_tokens`` times ``num_in`` features."""

    names: tuple[str, ...]
    num_in: int
    num_tokens: int


def share_out(sizes: Sequence[int], num_ranks: int, allowed: Sequence[Collection[int]] = ()) -> list[int]:
    """Return a rank for each job, the largest first: the one that has the least to do, of those ``allowed``, if any."""
    loads, ranks = [0] * num_ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        candidates = allowed[i] if allowed and allowed[i] else range(num_ranks)
        ranks[i] = min(candidates, key=loads.__getitem__)
        loads[ranks[i]] += sizes[i]
    return ranks


def find_holders(comm: Communicator, linears: Mapping[str, LinearLayer]) -> list[list[int]]:
    """Return for each of ``linears``, experts, the first and the last rank that hold it; none if all ranks do.

    Every rank must call it: one round of 16 bytes a layer.
    """

    def tell(words: torch.Tensor) -> None:
        held = [_is_here(linear) for linear in linears.values()]
        first = [-comm.rank if is_here else -comm.size for is_here in held]
        last = [comm.rank if is_here else -1 for is_here in held]
        words.copy_(torch.tensor([first, last], dtype=torch.int64, device="cpu"))

    firsts, lasts = max_together(comm, (2, len(linears)), tell).tolist()
    spread = (0, comm.size - 1)
    return [
        [-first, last] if last >= 0 and (-first, last) != spread else []
        for first, last in zip(firsts, lasts, strict=True)
    ]


def _is_here(linear: LinearLayer) -> bool:
    """Return whether this rank has the expert ``linear``, which is whole on a rank, or not there. Local."""
    runs = local_shard(linear.parameter_path, linear.parameter).geometry.dim_runs[0]
    return linear.expert is None or expert_place(runs, linear.expert) is not None
