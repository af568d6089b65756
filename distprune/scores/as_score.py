"""How much each element matters; higher = keep."""

from collections.abc import Callable

import torch

from distprune.hints import WALK
from distprune.scores.base import (
    ElementwiseScore,
    Score,
)
from distprune.scores.gradient import Gradient, Movement, Taylor
from distprune.scores.magnitude import Magnitude
from distprune.scores.random import Random
from distprune.scores.wanda import Wanda

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
