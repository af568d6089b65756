"""What a solver is: new rows for linear layers, from their weights and the statistics of their inputs.

A solver is its paper's loop. Who holds which rows, and what ranks tell each other, is the driver's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias

import torch
from typing_extensions import override

from distprune.calibration.moments import Moments, Needs
from distprune.masks.in_place import zero_all_where_pruned
from distprune.oneshot.rows import Rows
from distprune.patterns.base import Pattern
from distprune.scores.base import Elements, Score
from distprune.shards.device import on_host

Figure: TypeAlias = torch.Tensor | float  # a tensor, of one element, is fetched with all others of a call


@dataclass(frozen=True)
class Solved:
    """What became of this rank's rows of one layer: ``keep`` (rows, in), bool, says which weights the pattern keeps.

    ``error`` is ||X (W - W')^T||^2, ``None``: the driver finds it.
    """

    keep: torch.Tensor
    damping: Figure = 0.0
    error: Figure | None = None


class Computed(Score):
    """What a solver computes itself, and hands over in the place of weights: it is its own score."""

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return elements.weight


class ComputedSizes(Computed):
    """Of what a solver computes nothing is negative: that is quicker to choose from."""

    ordered_by, is_weight, kernel = "magnitude", True, "magnitude"


COMPUTED, SIZES = Computed(), ComputedSizes()


class Choose(Protocol):
    """Decides over the rows of all ranks. Every rank must call it equally often: those without rows, too."""

    def __call__(
        self, values: Mapping[str, torch.Tensor], pattern: Pattern, score: Score = COMPUTED
    ) -> dict[str, torch.Tensor]:
        """Return what stays of ``values``, by layer (rows, columns), bool.

        They are scores, higher = keep, with ``SIZES`` none negative; or weights, of which ``score`` makes scores: then
        zeros go first.
        """


def as_keys(sizes: torch.Tensor) -> torch.Tensor:
    """Return ``sizes``, float32 and not negative, as a pattern's ``keep`` is to sort them. Local.

    On a device their bits, which are in the same order: of integers none is NaN, so nobody waits to hear of one.
    """
    return sizes if on_host(sizes.device) else sizes.view(torch.int32)


class Solver(ABC):
    """Prunes rows of linear layers, from the statistics of their inputs.

    >>> from distprune.oneshot.solver import Solved
    >>> class Plain(Solver):
    ...     def solve(self, rows, moments, pattern, choose):  # of layers that share an input
    ...         keep = choose({name: layer.weight.abs() * moments.norms for name, layer in rows.items()}, pattern)
    ...         for name, layer in rows.items():
    ...             layer.weight.mul_(keep[name])
    ...         return {name: Solved(mask) for name, mask in keep.items()}
    >>> prune_blocks(llama, samples, method=Plain(), pattern="2:4").sparsity
    0.5

    ``needs``: ``"squares"`` of each input, or all ``"products"``, X^T X. ``needs_gram``: :meth:`prepare` is given W^T W
    of what :meth:`weighed` returns of all ranks' rows, too.
    """

    needs: ClassVar[Needs] = "squares"
    needs_gram: ClassVar[bool] = False

    def check(self, pattern: Pattern) -> None:  # noqa: B027
        """Raise a NotImplementedError unless it can prune by ``pattern``. Local."""

    def prepare(self, moments: Moments) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """Return what is made once of the ``products``, on one rank, which sends it to all that have rows.

        An inverse, say. They are in float64. Local; not for a solver that needs squares, which are on every rank.
        """
        return {}

    @abstractmethod
    def solve(self, rows: Mapping[str, Rows], moments: Moments, pattern: Pattern, choose: Choose) -> dict[str, Solved]:
        """Write new weights into this rank's ``rows`` of layers that share an input, and say what stays, by layer.

        ``moments.products`` are in float32, if the solver needs them; ``moments.prepared`` is what :meth:`prepare`
        returned. It talks to other ranks by ``choose`` alone.
        """

    def weighed(self, rows: Rows) -> torch.Tensor:
        """Return the weights of ``rows``, (rows, in), as their Gram matrix is to be taken."""
        return rows.weight


@dataclass(frozen=True)
class Scored(Solver):
    """Zeroes what scores lowest, and leaves the weights that stay as they are: Wanda, magnitude, random, one's own.

    ``by_row``: unstructured, too, the inputs of one output compete with each other. A layer that saw no token is scored
    as if all of its inputs were alike. Zeros go first.
    """

    score: Score
    by_row: bool = False

    @override
    def check(self, pattern: Pattern) -> None:
        if self.by_row:
            pattern.by_row()
        if others := sorted({*self.score.needs} - {"input_norm"}):
            raise NotImplementedError(f"{self.score!r} needs {others[0]!r}, which a walk has not; use prune_model")

    @override
    def solve(self, rows: Mapping[str, Rows], moments: Moments, pattern: Pattern, choose: Choose) -> dict[str, Solved]:
        weights = {name: layer.weight for name, layer in rows.items()}
        keep = choose(weights, pattern.by_row() if self.by_row else pattern, self.score)
        zero_all_where_pruned([(weight, keep[name]) for name, weight in weights.items()])
        return {name: Solved(mask) for name, mask in keep.items()}
