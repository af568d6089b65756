"""What became of the rows of each layer: figures of this rank's, on their device; and sums over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Figure
from distprune.shards.device import fetched


@dataclass
class Figures:
    """Of this rank's ``rows`` of a layer, until they are fetched: of an ``Outcome``, and whether it is one at all.

    ``num_nans``: among the scores of each choice.
    """

    rows: Rows
    output: Figure
    num_pruned: Figure = 0
    num_zeros: Figure = 0
    error: Figure = 0.0
    damping: Figure = 0.0
    is_finite: Figure = True
    num_nans: list[Figure] = field(default_factory=list)

    @property
    def numbers(self) -> list[Figure]:
        outcome = [self.num_pruned, self.num_zeros, self.error, self.output, self.damping]
        return [sum(self.num_nans), self.is_finite, *outcome]


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
    found: dict[str, Outcome] = {}
    for (layer, of_layer), numbers in zip(figures.items(), _fetched(figures), strict=True):
        (num_nans, is_finite, num_pruned, num_zeros, *others), rows = numbers, of_layer.rows
        if num_nans:
            raise ValueError(f"scores are NaN in {rows.name!r}; mend the values first")
        if not is_finite:
            raise ValueError(f"the new weights of {rows.name!r} are NaN or infinite in {rows.weight.dtype}")
        outcome = Outcome(int(num_pruned), int(num_zeros), *others)
        found[layer] = outcome if rows.owned else Outcome(damping=outcome.damping)
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


def _fetched(figures: Mapping[str, Figures]) -> list[list[float]]:
    numbers = [of_layer.numbers for of_layer in figures.values()]
    tensors = [number.reshape(()).double() for some in numbers for number in some if isinstance(number, torch.Tensor)]
    there = iter(torch.stack(fetched(tensors)).tolist() if tensors else ())
    return [[next(there) if isinstance(number, torch.Tensor) else float(number) for number in some] for some in numbers]
