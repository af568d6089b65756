"""What became of the rows of each layer: figures of this rank's, on their device; and sums over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.oneshot.solver import Figure, Solved
from distprune.shards.device import fetched


@dataclass
class Figures:
    """Of this rank's rows of layer ``name``, until they are fetched: of an ``Outcome``, and whether it is one at all.

    ``num_nans``: among the scores of each stage. ``owned``: this rank counts the rows.
    """

    name: str
    dtype: torch.dtype  # of the rows
    owned: bool
    output: Figure
    solved: Solved = field(default_factory=lambda: Solved(0, 0.0))
    num_zeros: Figure = 0
    is_finite: Figure = True
    num_nans: list[Figure] = field(default_factory=list)

    @property
    def all(self) -> list[Figure]:
        of = self.solved
        num_nans = sum(self.num_nans, of.num_nans)
        return [num_nans, self.is_finite, of.num_pruned, self.num_zeros, of.error, self.output, of.damping]


@dataclass(frozen=True)
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


def outcomes_of(figures: Mapping[str, Figures]) -> dict[str, Outcome]:
    """Return what this rank adds to the sums over ranks, by layer: one wait for a device. Local.

    Raises:
        ValueError: scores are NaN; new weights are not finite.
    """
    numbers = numbers_of([of.all for of in figures.values()])
    found: dict[str, Outcome] = {}
    for (layer, of), (num_nans, is_finite, *of_layer) in zip(figures.items(), numbers, strict=True):
        if num_nans:
            raise ValueError(f"scores are NaN in {of.name!r}; mend the values first")
        if not is_finite:
            raise ValueError(f"the new weights of {of.name!r} are NaN or infinite in {of.dtype}")
        num_pruned, num_zeros, *others = of_layer
        outcome = Outcome(int(num_pruned), int(num_zeros), *others)
        found[layer] = outcome if of.owned else Outcome(damping=outcome.damping)
    return found


def sum_outcomes(
    comm: Communicator, names: Sequence[str], outcomes: Callable[[], Mapping[str, Outcome]]
) -> dict[str, Outcome]:
    """Return the outcomes over all rows, by layer, of those of each rank: one round of 40 bytes a layer and 8.

    What ``outcomes`` raises on one rank is raised on all.
    """

    def fill(words: torch.Tensor) -> None:
        own, nothing = outcomes(), Outcome()
        numbers = [[*vars(own.get(name, nothing)).values()] for name in names]
        words.copy_(torch.tensor(numbers, dtype=torch.float64, device="cpu").view(words.shape))

    words = sum_together(comm, (len(names), len(dataclasses.fields(Outcome))), fill, torch.float64)
    return {
        name: Outcome(int(pruned), int(zeros), *others)
        for name, (pruned, zeros, *others) in zip(names, words.tolist(), strict=True)
    }


def numbers_of(figures: Sequence[Sequence[Figure]]) -> list[list[float]]:
    """Return what ``figures`` are: one wait for a device."""
    there = [of.reshape(()).double() for some in figures for of in some if isinstance(of, torch.Tensor)]
    found = iter(torch.stack(fetched(there)).tolist() if there else ())
    return [[next(found) if isinstance(of, torch.Tensor) else float(of) for of in some] for some in figures]
