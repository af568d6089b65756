"""What became of the rows of one map, in numbers that add up over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from distprune.collectives import Communicator

__all__ = ["Outcome", "sum_outcomes"]


@dataclass
class Outcome:
    """Of one rank's rows, or of all ranks'. ``error`` is ||X (W - W')^T||^2 and ``output`` is ||X W^T||^2."""

    num_pruned: int = 0
    num_zeros: int = 0
    error: float = 0.0
    output: float = 0.0

    @property
    def relative_error(self) -> float | None:
        """||X (W - W')^T|| / ||X W^T||; ``None`` where the map puts out nothing but zeros."""
        return (max(self.error, 0.0) / self.output) ** 0.5 if self.output > 0 else None


def sum_outcomes(comm: Communicator, outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return the outcomes over all rows, by map, of those of each rank. One round of 32 bytes a map."""
    words = torch.tensor(
        [[of.num_pruned, of.num_zeros, of.error, of.output] for of in outcomes.values()], dtype=torch.float64
    )
    return {
        name: Outcome(int(pruned), int(zeros), error, output)
        for name, (pruned, zeros, error, output) in zip(outcomes, comm.sum(words).tolist(), strict=True)
    }
