"""What became of the rows of each layer, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.oneshot.rows import Rows
from distprune.shards.device import fetched

NUM_FIGURES = 7  # how many scores were NaN, whether new weights are not finite, and those of an Outcome


@dataclass(frozen=True)
class Outcome:
    """``error`` is ||X (W - W')^T||^2 and ``output`` is ||X W^T||^2."""

    num_pruned: int = 0
    num_zeros: int = 0
    error: float = 0.0
    output: float = 0.0
    damping: float = 0.0

    @property
    def relative_error(self) -> float | None:
        """||X (W - W')^T|| / ||X W^T||; ``None`` where the layer puts out nothing but zeros."""
        return (max(self.error, 0.0) / self.output) ** 0.5 if self.output > 0 else None


def sum_outcomes(
    comm: Communicator, rows: Mapping[str, Rows], figures: Mapping[str, torch.Tensor]
) -> dict[str, Outcome]:
    """Return the outcomes over the ``rows`` of all ranks, by layer.

    ``figures`` (NUM_FIGURES,), float64, are what this rank adds, of layers that it has rows of, on their device: one
    wait. Every rank must call it: one round of 56 bytes a layer and 8.

    Raises:
        ValueError: on every rank: scores are NaN; new weights are not finite.
    """

    def fill(words: torch.Tensor) -> None:
        here = dict(zip(figures, fetched([*figures.values()]), strict=True))
        for name, word in zip(rows, words, strict=True):
            word.copy_(here.get(name, word))

    totals = sum_together(comm, (len(rows), NUM_FIGURES), fill, torch.float64).tolist()
    for of_layer, (num_nans, is_spoiled, *_) in zip(rows.values(), totals, strict=True):
        if num_nans:
            raise ValueError(f"scores are NaN in {of_layer.name!r}; mend the values first")
        if is_spoiled:
            raise ValueError(f"the new weights of {of_layer.name!r} are NaN or infinite in {of_layer.weight.dtype}")
    return {
        name: Outcome(int(num_pruned), int(num_zeros), *others)
        for name, (_, _, num_pruned, num_zeros, *others) in zip(rows, totals, strict=True)
    }
