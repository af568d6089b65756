"""Which matrices of a block count as linear layers, and which only choose where tokens go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distprune.models.linear_layers import dense_weights, linear_layers
from tests.architectures import tiny_model


def of_block(architecture: str, index: int = 0) -> set[str]:
    model: Any = tiny_model(architecture)
    return {name.rstrip(".0123456789") for name in linear_layers(model.model.layers[index])}


def test_gates_and_routers_of_real_models_stay_whole() -> None:
    attention = {f"self_attn.{kind}_proj" for kind in "qkvo"}
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    shared = {f"mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")}
    assert of_block("mixtral") == attention | experts
    assert of_block("qwen2_moe") == attention | experts | shared  # without mlp.shared_expert_gate
    assert of_block("qwen2_moe", 1) == attention | {f"mlp.{kind}_proj" for kind in ("gate", "up", "down")}


def stacked(num_experts: int) -> nn.Module:
    """Experts in 3-D weights, as transformers 5 has them."""
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.ones(num_experts, 12, 8))
    module.down_proj = nn.Parameter(torch.ones(num_experts, 8, 6))
    return module


def listed(num_experts: int) -> nn.Module:
    return nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8)) for _ in range(num_experts))


@pytest.mark.parametrize("make", [stacked, listed], ids=["stacked", "listed"])
def test_routers_are_told_by_where_they_stand(make: Any) -> None:
    block = nn.Module()
    block.experts = make(4)
    block.gate = nn.Linear(8, 4)  # the router
    block.router = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))  # one level down
    block.scale = nn.Linear(8, 1)  # a gate
    block.other = nn.Linear(8, 5)  # beside the experts, of another size
    block.shared = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))  # an MLP that happens to be as wide
    names = {name for name in linear_layers(block) if not name.startswith("experts")}
    assert names == {"other", "shared.0", "shared.1"}


def test_only_experts_may_be_out_of_reach() -> None:
    block = nn.Module()
    block.experts, block.gate = listed(4), nn.Linear(8, 4)
    block.halves = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])  # no router beside them chooses between two
    assert {name.split(".")[0] for name, linear in linear_layers(block).items() if linear.is_routed} == {"experts"}
    bare = nn.Module()
    bare.experts, bare.gate = stacked(4), nn.Module()
    bare.gate.weight = nn.Parameter(torch.ones(4, 8))
    assert dense_weights(bare) == {"gate.weight": "a router"}


def test_without_experts_nothing_is_a_router() -> None:
    block = nn.ModuleDict({"a": nn.Linear(8, 4), "one": nn.Linear(8, 1), "list": nn.ModuleList([nn.Linear(8, 8)])})
    assert list(linear_layers(block)) == ["a", "list.0"]


def test_why_others_stay_dense() -> None:
    block = nn.Module()
    block.experts = listed(4)
    block.gate = nn.Linear(8, 4)
    block.scale = nn.Linear(8, 1)
    block.conv = nn.Conv1d(8, 8, 3)
    block.own = nn.Parameter(torch.ones(5, 8))
    block.in_proj_weight = nn.Parameter(torch.ones(5, 8))
    block.grouped = nn.Linear(8, 8)
    block.grouped.n_groups = 2  # type: ignore[assignment]
    block.adapted = nn.ModuleDict({"base_layer": nn.Linear(8, 8), "lora_A": nn.Linear(8, 2)})
    beside = "kept beside layers, no weight by its name"
    assert dense_weights(block) == {
        "own": beside,
        "in_proj_weight": "not the weight of a linear layer that this library knows",
        "grouped.weight": "a linear layer in groups, each with inputs of its own",
        "gate.weight": "a router",
        "scale.weight": "a gate: it has one output",
        "conv.weight": "a convolution",
        "adapted.lora_A.weight": "an adapter",
    }
    assert "adapted.base_layer" in linear_layers(block)


def test_quantized_layers_are_refused() -> None:
    block = nn.ModuleDict({"up": nn.Linear(4, 4)})
    block["up"].weight = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    assert list(linear_layers(block)) == ["up"]
    block["up"].register_buffer("weight_scale", torch.ones(4, 1))
    with pytest.raises(TypeError, match=r"'up.weight' holds torch.float8_e4m3fn values, .* by 'weight_scale'"):
        linear_layers(block)
