"""Who stays where those of one matrix compete over all ranks: weights, or blocks of weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from distprune.collectives import Communicator, Member, roster_of_one
from distprune.methods.blocks import decide_blocks
from distprune.methods.decide import Candidate, Method, Rule
from distprune.selection import Block, Competition, Entry, Scores, common_order, select_lowest
from distprune.shards import LocalShard

__all__ = ["keep_blocks", "keep_weights"]


def keep_weights(
    comm: Communicator, shards: Sequence[LocalShard], scores: Sequence[Scores], amount: float
) -> list[torch.Tensor]:
    """Return what stays of each of ``shards`` (rows, columns), bool: all but the ``round(amount * numel)`` lowest.

    ``scores[i]`` are those of ``shards[i]``. Every rank must call it, with the same matrices in the same
    order; rounds: one ``select_lowest`` for all of them.
    """
    competitions: list[Competition] = []
    entries: list[Entry] = []
    for shard, of_shard in zip(shards, scores, strict=True):
        numel = math.prod(shard.geometry.global_shape)
        order = common_order([(of_shard.ordered_by, of_shard.dtype)])
        entries.append(Entry(shard.name, of_shard, shard.geometry, bool(shard.owned), len(competitions), 0))
        competitions.append(Competition(shard.name, order, numel, numel, round(amount * numel)))
    return select_lowest(comm, competitions, entries).masks


def keep_blocks(
    comm: Communicator,
    scores: Sequence[LocalShard],
    pattern: Block,
    *,
    method: Method = "magnitude",
    seed: int = 0,
    zeros_of: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return what stays of each of ``scores`` (rows, columns), bool; replicas are taken to be alike.

    Blocks whose weights, ``zeros_of``, are all zero go first and count. Every rank must call it, with the
    same matrices in the same order; rounds: those of ``decide_blocks``.
    """
    members = [Member(shard.name, shard.geometry.global_shape, str(shard.local.dtype)) for shard in scores]
    candidates = [
        Candidate(dataclasses.replace(shard, num_replicas=1), None if zeros_of is None else zeros_of[i])
        for i, shard in enumerate(scores)
    ]
    rule = Rule(method, pattern.amount, "tensor", seed, zeros="first", reads="nothing")
    return decide_blocks(comm, roster_of_one(comm, members), candidates, pattern, rule).masks
