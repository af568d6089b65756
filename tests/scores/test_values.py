"""Scores from gradients: the formula in float32, whatever the weights' dtype and sign. Integers: as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import distprune as prune
from distprune.scores.base import Elements
from tests.worlds import drawing


@pytest.mark.parametrize("score", ["gradient", "taylor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_equals_the_formula(score: str, dtype: torch.dtype) -> None:
    """In half precision many products would be the same, and others would be taken."""
    generator = torch.Generator().manual_seed(3)
    weight, gradient = torch.randn(2, 48, 40, generator=generator, dtype=torch.promote_types(dtype, torch.float32))
    weight, gradient = weight.to(dtype), gradient.to(dtype)
    layer = nn.Linear(40, 48, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
    parts = [torch.view_as_real(t) if dtype.is_complex else t[..., None] for t in (weight, gradient)]
    weights, gradients = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts)
    scores = ((weights * gradients).sum(-1) if score == "taylor" else gradient.abs()).flatten().abs()
    wanted = torch.ones(48 * 40, dtype=torch.bool)
    wanted[scores.argsort(stable=True)[: 24 * 40]] = False
    masks = prune.compute_masks(layer, 0.5, score=score, evidence={"gradient": {"weight": gradient}})
    assert torch.equal(masks["weight"], wanted.view(48, 40))


def test_integers_that_a_score_keeps_stay_as_they_are() -> None:
    kept = torch.arange(6, dtype=torch.int32)
    layer = nn.Linear(6, 1, bias=False)
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


class InPlace(prune.Score):
    needs = ("gradient",)

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return elements.weight.mul_(elements["gradient"].add_(1.0)).abs_()


class OutOfPlace(prune.Score):
    needs = ("gradient",)

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return (elements.weight * (elements["gradient"] + 1.0)).abs()


@pytest.mark.parametrize(
    ("in_place", "score"),
    [(lambda w: w.abs_(), lambda w: w.abs()), (InPlace(), OutOfPlace())],
    ids=["function", "class"],
)
@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "row", "block:4", "channels:0"])
def test_a_score_that_works_in_place_changes_nothing(in_place: Any, score: Any, pattern: str) -> None:
    with drawing(0):
        layer, gradient = nn.Linear(16, 8, bias=False), torch.randn(8, 16)
    weight, before = layer.weight.detach().clone(), gradient.clone()
    evidence = {"gradient": {"weight": gradient}} if isinstance(in_place, prune.Score) else None
    sparsity = None if pattern == "2:4" else 0.5
    masks, expected = (
        prune.compute_masks(layer, sparsity, pattern=pattern, score=each, evidence=evidence)
        for each in (in_place, score)
    )
    assert torch.equal(layer.weight, weight)
    assert torch.equal(gradient, before)
    assert torch.equal(masks["weight"], expected["weight"])
    prune.prune_model(layer, sparsity, pattern=pattern, score=in_place, evidence=evidence)
    assert torch.equal(layer.weight, weight * masks["weight"])
