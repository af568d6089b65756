"""On a CUDA device the masks are those of the CPU, and no call waits for it but where it fetches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune.collectives.communicator import Alone
from distprune.shards import device
from tests import test_contract, test_contract_reparametrized as reparametrized
from tests.architectures import samples, tiny_model
from tests.contract import SCRIPTS
from tests.layouts import LAYOUTS, Layout
from tests.pruning import test_patterns as patterns
from tests.sampling import all_pairs
from tests.selection.test_device import CALLS, alike, linear
from tests.wrapped import whole

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def there(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: there(part, device) for name, part in value.items()}
    return type(value)(there(part, device) for part in value) if isinstance(value, list | tuple) else value


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
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
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


ALONE = [layout for layout in LAYOUTS if 1 in layout.world_sizes]


@pytest.fixture
def _group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process alone, over NCCL."""
    monkeypatch.setattr("tests.layouts.DEVICE_TYPE", DEVICE)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("layout", ALONE, ids=[layout.name for layout in ALONE])
def test_the_contract_over_nccl(layout: Layout) -> None:
    axes = (test_contract.SCORES, test_contract.SCOPES, test_contract.DTYPES, test_contract.KINDS)
    cases: list[Any] = []
    for score, scope, dtype, (kind, sparsity) in all_pairs(*axes):
        model = test_contract.whole_model(kind, dtype)
        expected = test_contract.oracle(model, score, scope, sparsity)
        cases.append(there((score, scope, sparsity, model, expected), torch.device(DEVICE)))
    test_contract.check_rank(0, layout, 1, cases)
    patterns.check_rank(0, layout, 1, there(patterns.made(), torch.device(DEVICE)))
    for script in SCRIPTS:
        made = reparametrized.made(script, "ties", torch.bfloat16, True)
        reparametrized.check_rank(0, layout, 1, there([made], torch.device(DEVICE)))


@pytest.mark.usefixtures("_group")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in a thread of autograd that is new
@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize(
    "how",
    [
        {"method": "wanda", "pattern": "2:4"},
        {"method": "sparsegpt", "pattern": "2:4"},
        {"method": "sparsegpt", "sparsity": 0.5},
        {"method": "admm", "pattern": "2:4"},
        {"method": "admm", "sparsity": 0.5},
    ],
    ids=lambda how: " ".join(map(str, how.values())),
)
def test_one_shot_gives_what_the_cpu_gives(how: dict[str, Any], is_sharded: bool) -> None:
    here, model = tiny_model("llama"), tiny_model("llama").to(DEVICE)
    report = prune.prune_blocks(here, samples(8), **how)
    if is_sharded:
        fully_shard(model)
    other = prune.prune_blocks(model, samples(8), **how)
    assert (report.num_zeros, report.num_elements) == (other.num_zeros, other.num_elements)
    for (name, one), two in zip(here.named_parameters(), model.parameters(), strict=True):
        got = whole(two.detach()).cpu()
        assert float(((one == 0) != (got == 0)).double().mean()) < 0.03, name
        difference = (one.detach() - got).norm() / one.detach().norm()
        assert float(difference) < 0.15, name


def test_held_zeros_stay_and_the_others_learn() -> None:
    model: Any = nn.Sequential(*(nn.Linear(64, 64, device=DEVICE) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prune.prune_model(model, 0.5)
    hold = prune.hold_zeros(model, optimizer)
    before = [layer.weight.detach().clone() for layer in model]
    for _ in range(3):
        model(torch.randn(8, 64, device=DEVICE)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    hold.finish()
    for was, layer in zip(before, model, strict=True):
        assert torch.equal(layer.weight == 0, was == 0)
        assert bool((layer.weight != was)[was != 0].float().mean() > 0.99)
