"""One-shot pruning under tensor parallelism, alone and with data parallelism, is that of one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distprune import NByM, PerRow
from distprune.models.decoder_blocks import decoder_blocks
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import BLOCKS, FEW, HALF, TARGETS, TOKENS, Case, Pruned, check_ranks, pruned
from tests.removal.layouts import ATTENTION, QKV, columns, gated, shard
from tests.sampling import in_turn, only_whole
from tests.worlds import ProcessPool

MLP = gated("mlp")
# torch takes plain local tensors for even parts.
UNEVEN = {f"mlp.{kind}_proj": partial(ColwiseParallel, use_local_output=False) for kind in ("gate", "up")}
# By name: the architecture, what is changed in its configuration so that 2 ranks can halve it, and the plan.
PLANS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}, {**ATTENTION, **MLP}),
    "phi": (
        "phi",
        {},
        {**QKV, "self_attn.dense": RowwiseParallel, "mlp.fc1": ColwiseParallel, "mlp.fc2": RowwiseParallel},
    ),
    "llama-mlp": ("llama", {}, MLP),  # attention whole on every rank
    "llama-wide": (  # inputs of more than one and two blocks of SparseGPT's columns
        "llama",
        {"hidden_size": 160, "intermediate_size": 272, "num_key_value_heads": 2, "num_hidden_layers": 1},
        {**ATTENTION, **MLP},
    ),
    # Of the one feature between the layers of an MLP the second rank has none.
    "llama-narrow": ("llama", {"intermediate_size": 1, "num_key_value_heads": 2}, {**MLP, **UNEVEN}),
    "mixtral-attention": ("mixtral", {"num_key_value_heads": 2}, ATTENTION),
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
    # By columns: along the inputs, which row-wise layers are cut along already.
    return shard(model, data_mesh, shard_placement_fn=columns if layout == "fsdp-columns-tp" else None)


def on_rank(_: int, layout: str, plan: str, cases: list[Case], tokens: torch.Tensor) -> list[Pruned]:
    return [pruned(wrapped(layout, plan), case, tokens) for case in cases]


LAYOUT = [*TARGETS, *FEW, ("sparsegpt", PerRow(0.3)), ("wanda", BLOCKS), ("random", HALF)]
SMALL = [plan for plan in PLANS if plan not in ("llama-wide", "llama-narrow")]
WIDE: list[Case] = [("sparsegpt", NByM(2, 4)), ("sparsegpt", HALF)]


def check_as_one(pool: ProcessPool, key: tuple[str, str], cases: list[Case], tokens: torch.Tensor = TOKENS) -> None:
    layout, plan = key
    found = pool.run(2 if layout == "tp" else 4, on_rank, layout, plan, cases, tokens)
    check_ranks(found, partial(make, plan), cases, tokens, least=0.999)


# Most is tried under tensor parallelism alone.
@pytest.mark.parametrize(
    ("key", "cases"),
    [
        pytest.param(("tp", "llama"), LAYOUT[::4], id="tp-llama-some"),
        only_whole(("tp", "llama"), [case for case in LAYOUT if case not in LAYOUT[::4]], id="tp-llama-others"),
        pytest.param(("tp", "llama-narrow"), [("admm", HALF), ("wanda", HALF)], id="tp-llama-narrow"),
        *in_turn([("tp", plan) for plan in SMALL[1:]], FEW),
        pytest.param(("fsdp-tp", "llama"), [FEW[2]], id="fsdp-tp-llama-some"),
        only_whole(("fsdp-tp", "llama"), LAYOUT, id="fsdp-tp-llama-all"),
        *in_turn([("fsdp-tp", SMALL[-1])], FEW),
        *(only_whole(("fsdp-tp", plan), FEW, id=f"fsdp-tp-{plan}-few") for plan in SMALL[:-1]),
        *in_turn([(layout, "llama") for layout in ("hsdp-tp", "copies-tp", "fsdp-columns-tp")], FEW),
    ],
)
@pytest.mark.sampled(3)
def test_every_layout(pool: ProcessPool, key: tuple[str, str], cases: list[Case]) -> None:
    check_as_one(pool, key, cases)


# Fewer samples than data-parallel ranks; no multiple of them.
@pytest.mark.parametrize(("num_samples", "cases"), in_turn([1, 3], FEW))
@pytest.mark.sampled(1)
def test_samples_are_weighted_right(pool: ProcessPool, num_samples: int, cases: list[Case]) -> None:
    check_as_one(pool, ("fsdp-tp", "llama"), cases, TOKENS[:num_samples])


@pytest.mark.parametrize("cases", [WIDE, FEW], ids=["blocks", "few"])
@pytest.mark.whole
def test_many_blocks_of_columns(pool: ProcessPool, cases: list[Case]) -> None:
    # One layer, and tokens enough: a near tie that rounding turns changes the rest of its row, and what follows it.
    check_as_one(pool, ("fsdp-tp", "llama-wide"), cases, samples(29, 64))
