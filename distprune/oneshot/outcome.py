"""What became of the rows of each layer: figures of this rank's, on their device; and sums over all ranks.

Noun: a *trial* of a block prunes it as if nothing could go wrong, so that the host need not wait for a device to hear
whether inputs and new weights are finite and factors exist. Once all layers are done that is looked at, with all
figures at once. Where something was wrong the block is brought back to what it was, and pruned again with care.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from distprune.collectives import Communicator, sum_together
from distprune.oneshot.solver import Figure, Solved
from distprune.shards import fetched


@dataclass
class Figures:
    """Of this rank's rows of a layer, until they are fetched: of an ``Outcome``, and whether the new ones are finite.

    ``num_nans``: among the scores of each stage.
    """

    output: Figure
    solved: Solved = field(default_factory=lambda: Solved(0, 0.0))
    num_zeros: Figure = 0
    is_finite: Figure = True
    num_nans: list[Figure] = field(default_factory=list)
    owned: bool = True  # this rank counts the rows

    @property
    def all(self) -> list[Figure]:
        of = self.solved
        num_nans = sum(self.num_nans, of.num_nans)
        return [num_nans, self.is_finite, of.num_pruned, self.num_zeros, of.error, self.output, of.damping]

    def outcome(self, num_pruned: float, num_zeros: float, error: float, output: float, damping: float) -> Outcome:
        """Return what this rank adds to the sums over ranks; the arguments are the last of ``all``, fetched."""
        if not self.owned:
            return Outcome(damping=damping)
        return Outcome(int(num_pruned), int(num_zeros), error, output, damping)


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


@dataclass
class BlockTrial:
    """What is not looked at before a block is done: ``figures`` of this rank's rows, by layer, and ``doubts``.

    These are bool tensors of one element on their devices: whether something is as it was taken to be.
    """

    figures: dict[str, Figures] = field(default_factory=dict)
    doubts: list[torch.Tensor] = field(default_factory=list)

    def outcomes(self, comm: Communicator, names: Sequence[str]) -> dict[str, Outcome] | None:
        """Return the outcomes over all rows of layers ``names``; ``None``: something was wrong on a rank.

        Every rank must call it: one round of 40 bytes a layer and 48. One wait for a device.
        """
        trouble = "\0"  # the name of no layer

        def own() -> dict[str, Outcome]:
            *numbers, doubts = numbers_of([*(of.all for of in self.figures.values()), self.doubts])
            if not all(doubts) or any(num_nans or not is_finite for num_nans, is_finite, *_ in numbers):
                return {trouble: Outcome(num_pruned=1)}
            found = zip(self.figures.items(), numbers, strict=True)
            return {name: figures.outcome(*of_layer[2:]) for (name, figures), of_layer in found}

        totals = sum_outcomes(comm, [*names, trouble], own)
        return None if totals.pop(trouble).num_pruned else totals


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
