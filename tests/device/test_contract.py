"""The promise of tests/test_contract.py, sampled, on the simulated device: over the layouts that two ranks have.

And models that torch itself shards or splits there. What does not run on the device, and why:

- ``last-half`` of the layouts: to ranks outside of a mesh torch gives empty tensors of the CPU, whatever the mesh's
  device, which the test cannot compare with the device's.
- ``fully_shard`` with ``CPUOffloadPolicy`` of a model on the CPU: torch cannot put another device's data into a
  parameter of the CPU, but for devices that it names. One that was moved to the device before runs.
- Tensor parallelism of fewer KV heads than ranks: it is transformers that refuses it, on the CPU as well.
- CUDA's own: its kernels' rounding, its allocator's fragments, streams that do not wait for each other, graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel

import distprune as prune
from distprune.collectives.communicator import Alone
from tests import test_contract, test_contract_reparametrized as reparametrized
from tests.architectures import samples, tiny_model
from tests.contract import SCRIPTS
from tests.device.accelerator import DEVICE, on_rank
from tests.layouts import LAYOUTS, Layout
from tests.pruning import test_patterns as patterns
from tests.pruning.test_gpu import there
from tests.removal.layouts import parallelize, shard
from tests.sampling import all_pairs
from tests.worlds import ProcessPool
from tests.wrapped import transformer, whole

TWO_RANKS = [layout for layout in LAYOUTS if 2 in layout.world_sizes and layout.name != "last-half"]
AXES = (test_contract.SCORES, test_contract.SCOPES, test_contract.DTYPES, test_contract.KINDS)


def contract_on_rank(rank: int, name: str, number: int) -> None:
    """Of the contract's combinations every tenth, of patterns and scripts some, others for each layout."""
    device = on_rank(rank)
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    cases: list[Any] = []
    for score, scope, dtype, (kind, sparsity) in all_pairs(*AXES)[number % 10 :: 10]:
        model = test_contract.whole_model(kind, dtype)
        expected = test_contract.oracle(model, score, scope, sparsity)
        cases.append(there((score, scope, sparsity, model, expected), device))
    with patch("tests.layouts.DEVICE_TYPE", DEVICE):
        test_contract.check_rank(rank, layout, 2, cases)
        patterns.check_rank(rank, layout, 2, there(patterns.made()[number::12], device))
        for script in SCRIPTS[number::12]:
            kind, dtype = reparametrized.VALUES[number % 5]
            reparametrized.check_rank(rank, layout, 2, there([reparametrized.made(script, kind, dtype, True)], device))


@pytest.mark.parametrize("layout", TWO_RANKS, ids=[layout.name for layout in TWO_RANKS])
@pytest.mark.sampled(6)
def test_equals_single_process(devices: ProcessPool, layout: Layout) -> None:
    devices.run(2, contract_on_rank, layout.name, TWO_RANKS.index(layout))


def tensor_parallel_on_rank(rank: int) -> None:
    """Pruned and run in parts, as on the CPU."""
    device = on_rank(rank)
    here, parts = (tiny_model("llama", num_key_value_heads=2) for _ in range(2))
    parts = parallelize(parts.to(device), init_device_mesh(DEVICE, (2,)))
    ids = samples(2)
    for call in (
        lambda model, group: prune.prune_model(model, pattern="2:4", group=group),
        lambda model, group: prune.prune_blocks(model, ids, method="wanda", pattern="4:8", group=group),
    ):
        call(here, Alone())
        call(parts, None)
        for (name, weight), other in zip(here.named_parameters(), parts.parameters(), strict=True):
            assert torch.equal(weight, whole(other).cpu()), name
        with torch.no_grad():
            assert torch.allclose(parts(ids.to(device)).logits.cpu(), here(ids).logits, atol=1e-5)


def test_tensor_parallel(devices: ProcessPool) -> None:
    devices.run(2, tensor_parallel_on_rank)


def plain(model: nn.Module, device: torch.device) -> nn.Module:
    return model.to(device)


def fsdp1(model: nn.Module, device: torch.device) -> nn.Module:
    return FullyShardedDataParallel(model.to(device), use_orig_params=True, device_id=device)


def offloaded(model: nn.Module, device: torch.device) -> nn.Module:
    return shard(model.to(device), init_device_mesh(DEVICE, (2,)), offload_policy=CPUOffloadPolicy())


def trained_on_rank(rank: int, wrap: Callable[[nn.Module, torch.device], nn.Module]) -> tuple[int, int, float]:
    """Return the zeros of the pruned model, of the same after two steps, and the loss."""
    device = on_rank(rank)
    model = wrap(transformer(), device)
    tokens = torch.arange(14, device=device).view(2, 7) % 11
    report = prune.prune_model(model, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    prune.hold_zeros(model, optimizer)
    loss = torch.zeros(())
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return report.num_zeros, round(prune.sparsity(model) * report.num_elements), round(float(loss), 4)


@pytest.mark.parametrize("wrap", [fsdp1, offloaded])
def test_trains_as_a_plain_model(devices: ProcessPool, wrap: Callable[[nn.Module, torch.device], nn.Module]) -> None:
    (expected,) = devices.run(1, trained_on_rank, plain)
    assert expected[0] == expected[1] > 0
    assert devices.run(2, trained_on_rank, wrap) == [expected] * 2
