"""On a CUDA device the masks are those of the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.patterns import Pattern

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_masks_and_training_equal_the_cpus(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    here: Any = nn.Linear(384, 257).to(dtype)
    there: Any = copy.deepcopy(here).cuda()
    for module in (here, there):
        prune.l1_unstructured(module, "weight", 0.4)
        prune.ln_structured(module, "weight", 0.1, n=2, dim=0)
        prune.random_unstructured(module, "weight", 0.2, seed=3)
        prune.random_structured(module, "weight", 2, dim=1, seed=3)
    assert there.weight_mask.is_cuda
    assert torch.equal(here.weight_mask, there.weight_mask.cpu())
    assert torch.equal(here.weight, there.weight.cpu())
    x = torch.randn(5, 384, dtype=dtype)
    here(x).sum().backward()
    there(x.cuda()).sum().backward()
    grad = there.get_parameter("weight_orig").grad
    assert grad is not None
    assert not grad[there.weight_mask == 0].any()


def test_a_pruned_module_moves_to_the_device_and_back() -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 48)
    prune.l1_unstructured(module, "weight", 0.5)
    expected = module.weight.detach().clone()
    module.cuda()
    module(torch.randn(2, 64, device="cuda")).sum().backward()
    assert torch.equal(module.weight.detach().cpu(), expected)
    prune.remove(module.cpu(), "weight")
    assert torch.equal(module.weight, expected)


def test_in_place_equals_the_cpu() -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100))
    there = copy.deepcopy(here).cuda()
    for model in (here, there):
        prune.prune_model(model, 0.3, include="*")
        prune.prune_model(model, 0.5, score="random", seed=1, scope="tensor", include="*")
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("pattern", [prune.NByM(2, 4), prune.PerRow(0.3), prune.Block(4, 0.4)], ids=str)
def test_patterns_equal_the_cpus(pattern: Pattern) -> None:
    torch.manual_seed(0)
    here: Any = nn.Sequential(nn.Linear(300, 200), nn.Conv2d(8, 12, 2))
    there: Any = copy.deepcopy(here).cuda()
    for model in (here, there):
        prune.prune_model(model, pattern=pattern)
        prune.l1_unstructured(model[0], "weight", 0.1)
        prune.random_pattern(model[0], "weight", pattern, seed=3)
        prune.l1_pattern(model[1], "weight", pattern)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.weight_mask, other.weight_mask.cpu())
        assert torch.equal(one.weight, other.weight.cpu())
