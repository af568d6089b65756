"""Small shards are read, scored and decided together: what comes out is what comes out of each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import distprune as prune
from tests.worlds import run_threads

NUM = 7

CALLS: list[dict[str, Any]] = [
    {"scope": "tensor"},
    {"score": "random", "seed": 3, "scope": "tensor"},
    {"score": "gradient", "scope": "tensor"},
    {"score": lambda weights: weights.atan(), "scope": "tensor"},
    {"pattern": "row"},
    {"pattern": "row", "score": "random", "seed": 3},
    {"pattern": "channels:0"},
    {"pattern": "channels:1"},
    {"pattern": "channels:1", "score": "random", "seed": 3},
    {"pattern": prune.Channels(0.5, 0), "score": prune.ChannelNorm(float("inf"))},
    {"pattern": prune.Block(2, 0.5, "tensor"), "score": "gradient"},
]


def made(dtype: torch.dtype) -> nn.Module:
    """Return a model of equal matrices: some weights are zero, infinite, or very large or small in all."""
    generator, model = torch.Generator().manual_seed(5), nn.Module()
    for i in range(NUM):
        weight = torch.randn((12, 8), generator=generator) * 10.0 ** (8 * i - 24)
        weight[torch.rand((12, 8), generator=generator) < i / 10] = 0
        weight[i, 1] = torch.inf if i % 3 == 0 else 0
        model.register_parameter(f"p{i}", nn.Parameter(weight.to(dtype)))
        model.get_parameter(f"p{i}").grad = torch.randn((12, 8), generator=generator).to(dtype)
    return model


def masks(model: nn.Module, call: dict[str, Any], include: str = "*") -> dict[str, torch.Tensor]:
    sparsity = None if isinstance(call.get("pattern"), prune.Channels | prune.Block) else 0.5
    found = prune.compute_masks(model, sparsity, **call, include=include)
    return {name: mask.full_tensor() if isinstance(mask, DTensor) else mask for name, mask in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS, ids=[str(i) for i in range(len(CALLS))])
def test_together_as_alone(call: dict[str, Any], dtype: torch.dtype) -> None:
    model = made(dtype)
    alone = {name: mask for i in range(NUM) for name, mask in masks(model, call, f"p{i}").items()}

    def on_rank(_: int) -> None:
        mesh, sharded = init_device_mesh("cpu", (2,)), nn.Module()
        for name, weight in model.named_parameters():
            assert weight.grad is not None
            sharded.register_parameter(name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
            sharded.get_parameter(name).grad = distribute_tensor(weight.grad, mesh, [Shard(0)])
        for name, mask in masks(sharded, call).items():
            assert torch.equal(mask, alone[name]), name

    run_threads(2, on_rank)
    for name, mask in masks(model, call).items():
        assert torch.equal(mask, alone[name]), name
