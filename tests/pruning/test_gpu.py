"""On a CUDA device the masks are those of the CPU, and no call waits for it but where it fetches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.collectives.communicator import Alone
from distprune.selection.highest import keep_highest_per_row
from distprune.shards import device
from tests.selection.test_device import CALLS, alike, linear

pytestmark = pytest.mark.gpu


@pytest.fixture
def _no_wait_but_to_fetch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every other wait for the device an error."""
    original = device.fetched

    def fetch(tensors: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return original(tensors)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    for module in [module for name, module in sys.modules.items() if name.startswith("distprune")]:
        if getattr(module, "fetched", None) is original:
            monkeypatch.setattr(module, "fetched", fetch)
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "infinite"])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_equals_the_cpus(name: str, kind: str, dtype: torch.dtype) -> None:
    here = linear(kind).to(dtype)
    there = copy.deepcopy(here).cuda()
    for module in (here, there):
        CALLS[name](module, Alone())
    assert there.weight.is_cuda
    assert alike(here.weight, there.weight.cpu())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("_no_wait_but_to_fetch")
def test_a_call_waits_only_where_it_fetches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_DEVICE_CHUNK", 512)
    first, second = linear().cuda(), linear().cuda()
    CALLS[name](first, Alone())  # loops are loaded, libraries set up
    torch.cuda.set_sync_debug_mode("error")
    CALLS[name](second, Alone())


def test_training_equals_the_cpus() -> None:
    torch.manual_seed(0)
    here: Any = nn.Linear(384, 257)
    there: Any = copy.deepcopy(here).cuda()
    for module in (here, there):
        prune.l1_unstructured(module, "weight", 0.4)
        prune.ln_structured(module, "weight", 0.1, n=2, dim=0)
    assert there.weight_mask.is_cuda
    x = torch.randn(5, 384)
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


def test_several_parameters_equal_the_cpus() -> None:
    torch.manual_seed(0)
    here = nn.Sequential(nn.Linear(300, 200), nn.Conv2d(8, 12, 2), nn.Linear(200, 100))
    there = copy.deepcopy(here).cuda()
    for model in (here, there):
        prune.prune_model(model, 0.3, include="*")
        prune.prune_model(model, 0.4, score="random", seed=1, scope="tensor", include="*")
        prune.prune_model(model, 0.5, pattern="block:4")
        prune.prune_model(model, pattern="2:4")
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(one, other.cpu())


def test_groups_and_rows_equal_the_cpus() -> None:
    scores = torch.randn(64, 96).round()
    numbers = torch.arange(64)
    for here, there in (
        (prune.NByM(2, 4).keep(scores), prune.NByM(2, 4).keep(scores.cuda())),
        (prune.PerRow(0.5).keep(scores), prune.PerRow(0.5).keep(scores.cuda())),
        (keep_highest_per_row(scores, numbers), keep_highest_per_row(scores.cuda(), numbers.cuda())),
    ):
        assert torch.equal(here, there.cpu())
