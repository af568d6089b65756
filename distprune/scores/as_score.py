"""How much each element matters; higher = keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from distprune.hints import WALK
from distprune.scores.base import Elements, ElementwiseScore, Score
from distprune.scores.random import Random


@final
@dataclass(frozen=True)
class Magnitude(Score):
    """Absolute values. The scores are the weights, ordered by magnitude: nothing is computed or rounded.

    Of complex weights it is the modulus.

    >>> layer = torch.nn.Linear(2, 1)
    >>> layer.weight.data.copy_(torch.tensor([[1.0, -2.0]]))
    tensor([[ 1., -2.]])
    >>> report = prune_model(layer, 0.5, score=Magnitude())  # the default, or score="magnitude"
    >>> layer.weight.data
    tensor([[ 0., -2.]])
    """

    ordered_by = "magnitude"
    zero_where_weights_are = True
    is_weight = True
    kernel = "magnitude"

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        weight = elements.weight
        return weight.abs() if weight.is_complex() else weight

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        return weight.to_real() if weight.is_complex else weight


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
        return (_wide(elements.weight) * _wide(elements["gradient"]).conj()).real.abs()


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
        return _wide(elements["movement"]).real


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` in single precision or double: half precision rounds products away."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


@final
@dataclass(frozen=True)
class Wanda(Score):
    """|W_ij| * ||X_j||_2 (arXiv 2306.11695, section 3). Evidence ``input_norm``: ||X_j||_2, float32, per weight.

    >>> report = prune_blocks(llama, samples, method=Wanda(), pattern=PerRow(0.5))  # or 0.5, method="wanda"
    >>> report.sparsity
    0.5
    """

    needs = ("input_norm",)

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return elements.weight.abs().float() * elements["input_norm"]


# The scores that have a name as text.
SCORES: dict[str, type[Score]] = {
    "magnitude": Magnitude,
    "random": Random,
    "wanda": Wanda,
    "gradient": Gradient,
    "taylor": Taylor,
    "movement": Movement,
}

ScoreLike = Score | str | Callable[[torch.Tensor], torch.Tensor]


def as_score(score: ScoreLike) -> Score:
    """Return ``score`` as a :class:`Score`: it is one, the name of one, or a function of weights (1-D). Local.

    Raises:
        ValueError: a name that is not in :data:`SCORES`.
        TypeError: anything else.
    """
    if isinstance(score, Score):
        return score
    if isinstance(score, str):
        if score not in SCORES:
            walk = f"; {WALK.format(score)}" if score in ("admm", "sparsegpt") else ""
            alone = ", ".join(name for name, of in SCORES.items() if of.needs in ((), ("gradient",)))
            known = f"use {alone}, in SparseTraining also movement, a Score or a function of weights"
            raise ValueError(f"score={score!r} is not known; {known}{walk}")
        return SCORES[score]()
    if callable(score) and not isinstance(score, type):
        return ElementwiseScore(score)
    raise TypeError(f"score must be a name, a Score or a function of weights, not {score!r}")
