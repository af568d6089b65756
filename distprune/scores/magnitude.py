"""Magnitude: |w|, the score of ``torch.nn.utils.prune.l1_unstructured``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from distprune.scores.base import Elements, Score


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
