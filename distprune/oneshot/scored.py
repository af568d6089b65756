"""Pruning by a score, the weights that stay being left as they are: Wanda, magnitude, random, or one's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from distprune.calibration.moments import Moments
from distprune.masks.in_place import zero_where_pruned
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Pruning, Solved, Solver, Stage
from distprune.patterns.base import Pattern
from distprune.scores.base import LocalScores, Score, local_scores

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
    def begin(self, rows: Mapping[str, Rows], prepared: Moments, pattern: Pattern) -> Pruning:
        return _Scoring(rows, prepared, self.score)


@dataclass
class _Scoring(Pruning):
    rows: Mapping[str, Rows]
    moments: Moments
    score: Score
    keep: Sequence[torch.Tensor] = ()

    @override
    def scores(self, stage: int) -> list[LocalScores]:
        moments = self.moments
        norms = moments.square_sums.sqrt() if moments.num_tokens else torch.ones_like(moments.square_sums)
        shards = [of_layer.shard(of_layer.weight) for of_layer in self.rows.values()]
        evidence = {shard.name: {"input_norm": norms.expand_as(shard.local)} for shard in shards}
        return local_scores(self.score, shards, evidence, zeros_are_gone=True)

    @override
    def apply(self, stage: int, keep: Sequence[torch.Tensor]) -> None:
        self.keep = keep

    @override
    def finish(self) -> dict[str, Solved]:
        solved: dict[str, Solved] = {}
        for (name, of_layer), mask in zip(self.rows.items(), self.keep, strict=True):
            step = max(1, _CHUNK // max(of_layer.num_in, 1))
            error = torch.zeros((), dtype=torch.float64, device=mask.device)
            for weight, keep in zip(torch.split(of_layer.weight, step), torch.split(mask, step), strict=True):
                error += self.moments.squared_output(weight.float().masked_fill(keep, 0))
                zero_where_pruned(weight, keep)
            solved[name] = Solved(mask.numel() - torch.count_nonzero(mask), error)
        return solved
