"""A model of transformers in every layout in which units can leave it; blocks are sharded one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distprune.models import decoder_blocks

__all__ = ["LAYOUTS"]

PLAN: dict[str, Any] = {
    **{f"self_attn.{kind}_proj": ColwiseParallel for kind in "qkv"},
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for _, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **{k: v for k, v in options.items() if k != "shard_placement_fn"})
    return model


def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    for _, block in decoder_blocks(model):
        parallelize_module(block, mesh, {name: style() for name, style in PLAN.items()})
    return model


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def fsdp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def hsdp(model: nn.Module) -> nn.Module:
    return shard(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))


def tp(model: nn.Module) -> nn.Module:
    return parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    return shard(parallelize(model, mesh["tp"]), mesh["dp"])


def prefetched(model: nn.Module) -> nn.Module:
    fsdp()(model)
    blocks: Any = [block for _, block in decoder_blocks(model)]
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    return model


def root_only(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "fsdp": fsdp(),
    "fsdp-columns": fsdp(shard_placement_fn=columns),
    "fsdp-offload": fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp-to-2": fsdp(reshard_after_forward=2),
    "fsdp-bf16": fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp-prefetch": prefetched,
    "root": root_only,
    "hsdp": hsdp,
    "tp": tp,
    "fsdp-tp": fsdp_tp,
}
