"""Pruned before tensor parallelism or FSDP2 came: what is computed is masked, or it is said that it cannot be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import distprune as prune
from tests.worlds import ProcessPool, drawing
from tests.wrapped import whole


def layer_and_input() -> tuple[Any, torch.Tensor]:
    with drawing(0):
        return nn.Linear(8, 8), torch.randn(3, 8)


def parallel_on_rank(_: int) -> None:
    layer, x = layer_and_input()
    prune.l1_unstructured(layer, "weight", 0.5)
    wanted = layer(x)
    parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel(use_local_output=False))
    for _ in range(2):
        torch.testing.assert_close(whole(layer(x)), wanted)
        assert (whole(layer.weight) == 0).sum() == 32
        assert prune.sparsity(prune.shard_masks(layer)) == 0.5


def test_parallelized_after_it_was_pruned(pool: ProcessPool) -> None:
    pool.run(2, parallel_on_rank)


def parallel_then_sharded_on_rank(_: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    layer, x = layer_and_input()
    parallelize_module(layer, mesh["tp"], ColwiseParallel(use_local_output=False))
    prune.l1_unstructured(layer, "weight", 0.5)
    wanted = whole(layer(x))
    fully_shard(layer, mesh=mesh["dp"])
    torch.testing.assert_close(whole(layer(x)), wanted)
    for read in (lambda: prune.shard_masks(layer), lambda: layer.weight):
        with pytest.raises(ValueError, match="redistribute it to the parameter's layout"):
            read()


def test_parallelized_then_pruned_then_sharded(pool: ProcessPool) -> None:
    pool.run(2, parallel_then_sharded_on_rank)


def flattened_on_rank(_: int) -> None:
    layer, x = layer_and_input()
    wanted = prune.l1_unstructured(layer, "weight", 0.5)(x)
    model = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
    torch.testing.assert_close(model(x), wanted)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        assert "weight_mask" in model.state_dict()


def test_flattened_by_fsdp1_after_it_was_pruned(pool: ProcessPool) -> None:
    pool.run(2, flattened_on_rank)


def test_masks_and_their_model_share_no_memory(pool: ProcessPool) -> None:
    pool.run(2, put_on_rank)


def put_on_rank(_: int) -> None:
    layer = layer_and_input()[0]
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    masks = prune.compute_masks(layer, 0.5)
    masks.reparametrize()
    before = copy.deepcopy(masks["weight"])
    with torch.no_grad():
        layer.weight_mask.to_local().fill_(True)
    assert torch.equal(whole(masks["weight"]), whole(before))
