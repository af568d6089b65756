"""Scores from the backward pass: how the loss changes with a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from distprune.scores.base import Elements, Score


@final
@dataclass(frozen=True)
class Gradient(Score):
    """|g|: how fast the loss changes with the weight. Evidence ``gradient``: by default that of the parameter.

    >>> layer = torch.nn.Linear(8, 4)
    >>> layer(torch.ones(8)).sum().backward()
    >>> prune_model(layer, 0.5, score=Gradient()).sparsity  # or score="gradient"
    0.5
    """

    needs = ("gradient",)
    kernel = "gradient"

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return _wide(elements["gradient"]).abs()


@final
@dataclass(frozen=True)
class Taylor(Score):
    """|w g|: the change of the loss, to first order, if the weight becomes zero (arXiv 1906.10771, equation 8).

    >>> layer = torch.nn.Linear(8, 4)
    >>> layer(torch.ones(8)).sum().backward()
    >>> prune_model(layer, 0.5, score=Taylor()).sparsity  # or score="taylor"
    0.5

    At initialisation, with the gradient of one batch, it is SNIP's score (arXiv 1810.02340, equation 5, which divides
    by the sum of all: the order is the same). Evidence ``gradient``: by default that of the parameter.
    """

    needs = ("gradient",)
    kernel = "taylor"

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return (_wide(elements.weight) * _wide(elements["gradient"])).abs()


@final
@dataclass(frozen=True)
class Movement(Score):
    """-sum_t w g: weights that move away from zero are kept (arXiv 2005.07683, section 4).

    >>> layer = torch.nn.Linear(8, 4)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> training = SparseTraining(layer, optimizer, schedule=constant(0.5), score=Movement())

    Evidence ``movement``: that sum over the steps of training so far; :class:`distprune.SparseTraining` collects it.
    """

    needs = ("movement",)

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return _wide(elements["movement"])


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as float32, or float64 if they are: half precision rounds products away."""
    return values if values.dtype is torch.float64 else values.float()
