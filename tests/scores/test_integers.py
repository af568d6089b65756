"""Integers that a score returns are compared as they are, without a copy."""

from __future__ import annotations

import torch
from typing_extensions import override

import distprune as prune
from distprune.scores.base import Elements


def test_integers_that_a_score_keeps_stay_as_they_are() -> None:
    kept = torch.arange(6, dtype=torch.int32)
    layer = torch.nn.Linear(6, 1, bias=False)
    with torch.no_grad():
        layer.weight[0, 3] = 0.0

    class Kept(prune.Score):
        @override
        def values(self, elements: Elements) -> torch.Tensor:
            return kept[elements.at]

        @override
        def dtype(self, weight: torch.dtype) -> torch.dtype:
            return torch.int32

    prune.prune_model(layer, 0.5, score=Kept())
    assert kept.tolist() == [*range(6)]
    assert torch.nonzero(layer.weight[0] == 0).flatten().tolist() == [0, 1, 3]
