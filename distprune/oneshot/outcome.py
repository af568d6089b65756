"""What became of the rows of one layer, in numbers that add up over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from distprune.collectives import Communicator, sum_together

__all__ = ["Outcome", "sum_outcomes"]


@dataclass
class Outcome:
    """Of one rank's rows, or of all ranks'. ``error`` is ||X (W - W')^T||^2 and ``output`` is ||X W^T||^2."""

    num_pruned: int = 0
    num_zeros: int = 0
    error: float = 0.0
    output: float = 0.0
    damping: float = 0.0

    @property
    def relative_error(self) -> float | None:
        """||X (W - W')^T|| / ||X W^T||; ``None`` where the layer puts out nothing but zeros."""
        return (max(self.error, 0.0) / self.output) ** 0.5 if self.output > 0 else None


def sum_outcomes(comm: Communicator, names: Sequence[str], of: Callable[[str], Outcome]) -> dict[str, Outcome]:
    """Return the outcomes over all rows, by layer, of those of each rank: one round of 40 bytes a layer and 8.

    What ``of`` raises on one rank is raised on all.
    """

    def fill(words: torch.Tensor) -> None:
        for row, name in zip(words, names, strict=True):
            row.copy_(torch.tensor(dataclasses.astuple(of(name)), dtype=torch.float64))

    words = sum_together(comm, (len(names), len(dataclasses.fields(Outcome))), fill, torch.float64)
    return {
        name: Outcome(int(pruned), int(zeros), *others)
        for name, (pruned, zeros, *others) in zip(names, words.tolist(), strict=True)
    }
