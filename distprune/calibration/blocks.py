"""Blocks of weights in one-shot pruning: those of each matrix compete by the sums of their scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from distprune.collectives import Communicator, Member, roster_of_one
from distprune.methods.blocks import decide_blocks
from distprune.methods.decide import Candidate, Method, Rule
from distprune.selection import Block
from distprune.shards import LocalShard

__all__ = ["keep_blocks"]


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
