"""Pruning by a score, the weights that stay being left as they are: Wanda, magnitude, random, or one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from distprune.calibration import Moments
from distprune.masks import zero_where_pruned
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Solved, Solver, Solving, Stage
from distprune.patterns import Pattern
from distprune.scores import Score, local_scores

__all__ = ["Scored"]

_CHUNK = 1 << 20  # weights whose outputs are computed at a time


@dataclass(frozen=True)
class Scored(Solver[Moments]):
    """Zeroes what scores lowest. ``by_row``: unstructured, too, the inputs of one output compete with each other.

    A layer that saw no token is scored as if all of its inputs were alike. Zeros go first. Temporaries beyond the masks
    stay under 64 MiB. The errors are estimates: see ``Moments.squared_output``.
    """

    score: Score
    by_row: bool = False

    @override
    def scored_by(self, score: Score) -> Solver[Moments]:
        return dataclasses.replace(self, score=score)

    @override
    def stages(self, num_in: int, pattern: Pattern) -> Sequence[Stage]:
        return [Stage(0, num_in, pattern.by_row() if self.by_row else pattern)]

    @override
    def prepare(self, moments: Moments) -> Moments:
        return moments

    @override
    def prune(self, rows: Mapping[str, Rows], prepared: Moments, pattern: Pattern) -> Solving:
        norms = prepared.square_sums.sqrt() if prepared.num_tokens else torch.ones_like(prepared.square_sums)
        shards = [of_layer.shard(of_layer.weight) for of_layer in rows.values()]
        evidence = {shard.name: {"input_norm": norms.expand_as(shard.local)} for shard in shards}
        masks = yield dict(zip(rows, local_scores(self.score, shards, evidence, in_place=True), strict=True))
        solved: dict[str, Solved] = {}
        for name, of_layer in rows.items():
            step, error = max(1, _CHUNK // max(of_layer.num_in, 1)), 0.0
            for start in range(0, len(of_layer.weight), step):
                weight, keep = of_layer.weight[start : start + step], masks[name][start : start + step]
                error += prepared.squared_output(weight.float().masked_fill(keep, 0))
                zero_where_pruned(weight, keep)
            solved[name] = Solved(masks[name].numel() - int(torch.count_nonzero(masks[name])), error)
        return solved
