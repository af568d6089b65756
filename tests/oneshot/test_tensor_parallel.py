"""One-shot pruning under tensor parallelism, alone and with data parallelism, is that of one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distprune import NByM, PerRow
from distprune.models.decoder_blocks import decoder_blocks
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import BLOCKS, FEW, HALF, TARGETS, TOKENS, Case, Pruned, check_ranks, pruned
from tests.sampling import in_turn, only_whole
from tests.worlds import ProcessPool

ATTENTION = {f"self_attn.{kind}_proj": ColwiseParallel for kind in "qkv"}
MLP = {"mlp.gate_proj": ColwiseParallel, "mlp.up_proj": ColwiseParallel, "mlp.down_proj": RowwiseParallel}
# torch takes plain local tensors for even parts.
UNEVEN = {f"mlp.{kind}_proj": partial(ColwiseParallel, use_local_output=False) for kind in ("gate", "up")}
# By name: the architecture, what is changed in its configuration so that 2 ranks can halve it, and the plan.
PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}, {**ATTENTION, "self_attn.o_proj": RowwiseParallel, **MLP}),
    "phi": (
        "phi",
        {},
        {**ATTENTION, "self_attn.dense": RowwiseParallel, "mlp.fc1": ColwiseParallel, "mlp.fc2": RowwiseParallel},
    ),
    "llama-mlp": ("llama", {}, MLP),  # attention whole on every rank
    "llama-wide": (  # inputs of more than one and two blocks of SparseGPT's columns
        "llama",
        {"hidden_size": 160, "intermediate_size": 272, "num_key_value_heads": 2, "num_hidden_layers": 1},
        {**ATTENTION, "self_attn.o_proj": RowwiseParallel, **MLP},
    ),
    # Of the one feature between the layers of an MLP the second rank has none.
    "llama-narrow": ("llama", {"intermediate_size": 1, "num_key_value_heads": 2}, {**MLP, **UNEVEN}),
    "mixtral-attention": ("mixtral", {"num_key_value_heads": 2}, {**ATTENTION, "self_attn.o_proj": RowwiseParallel}),
}
AXES = ("replicate", "shard", "tp")


def make(plan: str) -> nn.Module:
    architecture, changes, _ = PLANS[plan]
    return tiny_model(architecture, **changes)


def parallelized(plan: str, mesh: DeviceMesh) -> nn.Module:
    model = make(plan)
    for _, block in decoder_blocks(model):
        parallelize_module(block, mesh, {name: style() for name, style in PLANS[plan][2].items()})
    return model


def wrapped(layout: str, plan: str) -> nn.Module:
    num_ranks = torch.distributed.get_world_size()
    if layout == "tp":
        return parallelized(plan, init_device_mesh("cpu", (num_ranks,)))
    shape = (2, 1, 2) if layout == "hsdp-tp" else (num_ranks // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[-len(shape) :])
    model = parallelized(plan, mesh["tp"])
    if layout == "copies-tp":  # as under DDP: each tensor-parallel group has the whole model
        return model
    data_mesh = mesh["replicate", "shard"] if layout == "hsdp-tp" else mesh["shard"]
    place = columns if layout == "fsdp-columns-tp" else None
    for _, block in decoder_blocks(model):
        fully_shard(block, mesh=data_mesh, shard_placement_fn=place)
    fully_shard(model, mesh=data_mesh)
    return model


def columns(parameter: nn.Parameter) -> Shard | None:
    """Along the inputs, which row-wise layers are cut along already."""
    return Shard(1) if parameter.ndim == 2 else None


def on_rank(_: int, layout: str, plan: str, cases: list[Case], tokens: torch.Tensor) -> list[Pruned]:
    return [pruned(wrapped(layout, plan), case, tokens) for case in cases]


LAYOUT = [*TARGETS, *FEW, ("sparsegpt", PerRow(0.3)), ("wanda", BLOCKS), ("random", HALF)]
SMALL = [plan for plan in PLANS if plan not in ("llama-wide", "llama-narrow")]


@pytest.mark.parametrize(
    ("plan", "cases"),
    [
        pytest.param("llama", LAYOUT[::4], id="llama-some"),
        only_whole("llama", [case for case in LAYOUT if case not in LAYOUT[::4]], id="llama-others"),
        pytest.param("llama-narrow", [("admm", HALF), ("wanda", HALF)], id="llama-narrow"),
        *in_turn(SMALL[1:], FEW),
    ],
)
@pytest.mark.sampled(1)
def test_tensor_parallel(pool: ProcessPool, plan: str, cases: list[Case]) -> None:
    check_ranks(pool.run(2, on_rank, "tp", plan, cases, TOKENS), partial(make, plan), cases, least=0.999)


# Fewer samples than data-parallel ranks; no multiple of them.
@pytest.mark.parametrize(("num_samples", "cases"), in_turn([1, 3], FEW))
@pytest.mark.sampled(1)
def test_samples_are_weighted_right(pool: ProcessPool, num_samples: int, cases: list[Case]) -> None:
    tokens = TOKENS[:num_samples]
    found = pool.run(4, on_rank, "fsdp-tp", "llama", cases, tokens)
    check_ranks(found, partial(make, "llama"), cases, tokens, least=0.999)


# Most is tried under tensor parallelism alone.
@pytest.mark.parametrize(
    ("plan", "cases"),
    [
        pytest.param("llama", [FEW[2]], id="llama-some"),
        only_whole("llama", LAYOUT, id="llama-all"),
        *in_turn(SMALL[-1:], FEW),
        *(only_whole(plan, FEW, id=f"{plan}-few") for plan in SMALL[:-1]),
    ],
)
@pytest.mark.sampled(1)
def test_fsdp_and_tensor_parallel(pool: ProcessPool, plan: str, cases: list[Case]) -> None:
    check_ranks(pool.run(4, on_rank, "fsdp-tp", plan, cases, TOKENS), partial(make, plan), cases, least=0.999)


@pytest.mark.parametrize(
    "cases", [[("sparsegpt", NByM(2, 4)), ("sparsegpt", HALF)], only_whole(FEW, id="few")], ids=["blocks", None]
)
@pytest.mark.whole
def test_many_blocks_of_columns(pool: ProcessPool, cases: list[Case]) -> None:
    # One layer, and tokens enough: a near tie that rounding turns changes the rest of its row, and what follows it.
    tokens = samples(13, 64)
    found = pool.run(4, on_rank, "fsdp-tp", "llama-wide", cases, tokens)
    check_ranks(found, partial(make, "llama-wide"), cases, tokens, least=0.999)


@pytest.mark.parametrize(("layout", "cases"), in_turn(["hsdp-tp", "copies-tp", "fsdp-columns-tp"], FEW))
@pytest.mark.sampled(1)
def test_other_layouts_over_tensor_parallel_groups(pool: ProcessPool, layout: str, cases: list[Case]) -> None:
    found = pool.run(4, on_rank, layout, "llama", cases, TOKENS)
    check_ranks(found, partial(make, "llama"), cases, least=0.999)
