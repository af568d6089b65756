"""Pruning a block by scores, the weights that stay being left as they are: Wanda, magnitude and random.

Wanda (arXiv 2306.11695, section 3) scores weight (i, j) by |W_ij| * ||X_j||_2 and lets the inputs of one
output compete with each other. The same walk prunes by |W_ij| alone, or by a hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from distprune.calibration.keep import keep_blocks, keep_weights
from distprune.calibration.outcome import Outcome
from distprune.calibration.rows import Rows
from distprune.calibration.statistics import Moments
from distprune.collectives import Communicator
from distprune.masks import zero_where_pruned
from distprune.methods.decide import Method
from distprune.scores import Magnitude, Random
from distprune.selection import (
    Block,
    NByM,
    Pattern,
    PerRow,
    Scores,
    Unstructured,
    keep_highest_per_group,
    keep_highest_per_row,
)
from distprune.shards import LocalShard

__all__ = ["ScoredBy", "prune_by_scores"]

ScoredBy = Literal["wanda", "magnitude", "random"]

_CHUNK = 1 << 20  # weights whose scores are in memory at a time


def prune_by_scores(
    comm: Communicator,
    prefix: str,
    rows: Mapping[str, Rows],
    moments: list[Moments],
    method: ScoredBy,
    pattern: Pattern,
    seed: int,
) -> dict[str, Outcome]:
    """Zero the weights of ``rows`` (by map; of the block ``prefix``) that ``method`` and ``pattern`` say, in place.

    ``moments`` are of ``"features"``. Wanda scores a map that saw no token by |W| alone, as if all of its
    inputs were alike. Zeros come first by magnitude and at random.

    Every rank must call it. Nothing is communicated, except where whole matrices compete (magnitude and
    random, unstructured): one ``select_lowest`` for all of them; and for blocks, one ``decide_blocks``, in which
    those of each matrix compete by the sums of their scores. Temporaries beyond its masks stay under 64 MiB,
    but for Wanda's scores where blocks compete: those of all rows, in float32. The errors returned are
    estimates: see ``Moments.squared_output``. Replicas are counted once.
    """
    moments_of = {name: m for m in moments for name in m.names}
    square_sums = {
        name: m.square_sums if m.num_tokens else torch.ones_like(m.square_sums) for name, m in moments_of.items()
    }
    whole: dict[str, torch.Tensor] = {}
    if isinstance(pattern, Unstructured) and method != "wanda":
        whole = _by_matrix(comm, prefix, rows, method, pattern.amount, seed)
    if isinstance(pattern, Block):
        whole = _by_blocks(comm, prefix, rows, square_sums, method, pattern, seed)
    outcomes: dict[str, Outcome] = {}
    for name, of_map in rows.items():
        outcome = outcomes[name] = Outcome()
        sums = square_sums[name]
        for start, stop in _stretches(of_map):
            weight = of_map.weight[start:stop]
            if isinstance(pattern, Block) or name in whole:
                keep = whole[name][start:stop]
            elif method == "wanda":
                keep = _keep(weight.abs().float() * sums.sqrt(), pattern)
            else:
                scores = _scores(of_map.shard(f"{prefix}.{name}", of_map.weight), method, seed)
                keep = _keep(_values(scores, start, stop, of_map.num_in), pattern)
            values = weight.float()
            outcome.output += moments_of[name].squared_output(values)
            outcome.error += moments_of[name].squared_output(values.masked_fill(keep, 0))
            outcome.num_pruned += keep.numel() - int(torch.count_nonzero(keep))
            zero_where_pruned(weight, keep)
            outcome.num_zeros += keep.numel() - int(torch.count_nonzero(weight))
    return {name: outcome if rows[name].owned else Outcome() for name, outcome in outcomes.items()}


def _stretches(rows: Rows) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK // max(rows.num_in, 1))
    for start in range(0, len(rows.weight), step):
        yield start, min(start + step, len(rows.weight))


def _keep(scores: torch.Tensor, pattern: NByM | PerRow | Unstructured) -> torch.Tensor:
    if isinstance(pattern, NByM):
        return keep_highest_per_group(scores, pattern.n, pattern.m)
    return keep_highest_per_row(scores, round(pattern.amount * scores.shape[1]))


def _scores(shard: LocalShard, method: ScoredBy, seed: int) -> Scores:
    return Random(shard, seed, zeros_first=True) if method == "random" else Magnitude(shard)


def _values(scores: Scores, start: int, stop: int, num_in: int) -> torch.Tensor:
    values = scores.values(start * num_in, stop * num_in).view(-1, num_in)
    return values.abs() if scores.ordered_by == "magnitude" else values


def _by_matrix(
    comm: Communicator, prefix: str, rows: Mapping[str, Rows], method: ScoredBy, amount: float, seed: int
) -> dict[str, torch.Tensor]:
    """Return what stays, (rows, in), of every map; all maps' competitions in one selection."""
    shards = [of_map.shard(f"{prefix}.{name}", of_map.weight) for name, of_map in rows.items()]
    scores = [_scores(shard, method, seed) for shard in shards]
    return dict(zip(rows, keep_weights(comm, shards, scores, amount), strict=True))


def _by_blocks(
    comm: Communicator,
    prefix: str,
    rows: Mapping[str, Rows],
    square_sums: Mapping[str, torch.Tensor],
    method: ScoredBy,
    pattern: Block,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Return what stays, (rows, in), of every map; all maps' competitions in one selection."""
    scores = [
        of_map.shard(
            f"{prefix}.{name}",
            of_map.weight.abs().float() * square_sums[name].sqrt() if method == "wanda" else of_map.weight,
        )
        for name, of_map in rows.items()
    ]
    weights = [of_map.weight for of_map in rows.values()]
    scored: Method = "random" if method == "random" else "magnitude"
    return dict(zip(rows, keep_blocks(comm, scores, pattern, method=scored, seed=seed, zeros_of=weights), strict=True))
