"""A model of transformers in every layout in which units can leave it; blocks are sharded one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distprune.models.decoder_blocks import decoder_blocks

__all__ = ["LAYOUTS", "PLANS"]

QKV: dict[str, Any] = {f"self_attn.{kind}_proj": ColwiseParallel for kind in "qkv"}
ATTENTION: dict[str, Any] = {**QKV, "self_attn.o_proj": RowwiseParallel}


def gated(place: str) -> dict[str, Any]:
    return {f"{place}.gate_proj": ColwiseParallel, f"{place}.up_proj": ColwiseParallel} | {
        f"{place}.down_proj": RowwiseParallel
    }


# Tensor parallelism as transformers plans it, by architecture, of what torch has a style for; others have no plan.
PLANS: dict[str, dict[str, Any]] = {
    **{name: {**ATTENTION, **gated("mlp")} for name in ("llama", "qwen2", "qwen3", "gemma")},
    "phi3": {
        **dict.fromkeys(
            ("self_attn.qkv_proj", "mlp.gate_up_proj"), partial(ColwiseParallel, output_layouts=Replicate())
        ),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), partial(RowwiseParallel, input_layouts=Replicate())),
    },
    "gpt_neox": {
        "attention.query_key_value": ColwiseParallel,
        "attention.dense": RowwiseParallel,
        "mlp.dense_h_to_4h": ColwiseParallel,
        "mlp.dense_4h_to_h": RowwiseParallel,
    },
    "mixtral": ATTENTION,
    "qwen2_moe": {**ATTENTION, **gated("mlp"), **gated("mlp.shared_expert")},
}


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for _, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **{k: v for k, v in options.items() if k != "shard_placement_fn"})
    return model


def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    config: Any = model.config
    for _, block in decoder_blocks(model):
        there = {name for name, _ in block.named_modules()}
        plan = {name: style() for name, style in PLANS[config.model_type].items() if name in there}
        parallelize_module(block, mesh, plan)
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
