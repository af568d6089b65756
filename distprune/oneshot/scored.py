"""Pruning by a score, the weights that stay being left as they are: Wanda, magnitude, random, or one's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from typing_extensions import override

from distprune.calibration.moments import Moments
from distprune.masks.in_place import zero_where_pruned
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Choose, Solved, Solver
from distprune.patterns.base import Pattern
from distprune.scores.base import Score
from distprune.shards.device import row_chunks


@dataclass(frozen=True)
class Scored(Solver):
    """Zeroes what scores lowest. ``by_row``: unstructured, too, the inputs of one output compete with each other.

    A layer that saw no token is scored as if all of its inputs were alike. Zeros go first.
    """

    score: Score
    by_row: bool = False

    @override
    def solve(self, rows: Mapping[str, Rows], moments: Moments, pattern: Pattern, choose: Choose) -> dict[str, Solved]:
        weights = {name: of_layer.weight for name, of_layer in rows.items()}
        keep = choose(weights, pattern.by_row() if self.by_row else pattern, self.score)
        for name, weight in weights.items():
            for some, mask in row_chunks(weight, keep[name]):
                zero_where_pruned(some, mask)
        return {name: Solved(mask) for name, mask in keep.items()}
