"""Which parameters are meant, and what the caller must know to decide for all ranks together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distprune.models.find_shards import find_shards


def stage(num_blocks: int) -> nn.ModuleDict:
    parts: dict[str, nn.Module] = {"norm": nn.LayerNorm(4), "head": nn.Linear(4, 9)}
    if num_blocks:
        parts["layers"] = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(num_blocks))
    return nn.ModuleDict(parts)


def test_a_stage_says_whether_it_has_blocks() -> None:
    """A stage of the norm and the head alone would prune its head; the caller hears of other ranks' blocks."""
    first, last = find_shards(stage(2)), find_shards(stage(0))
    assert [shard.name for shard in first.shards] == ["layers.0.0.weight", "layers.1.0.weight"]
    assert (first.lacks_blocks, first.has_blocks) == (False, True)
    assert [shard.name for shard in last.shards] == ["head.weight"]
    assert (last.lacks_blocks, last.has_blocks) == (True, False)
    said = find_shards(stage(0), include=["head.*"])
    assert (said.lacks_blocks, said.has_blocks) == (False, False)


def test_a_bare_pattern_is_a_list_of_one() -> None:
    model = stage(2)
    found = find_shards(model, "layers.*", "*.bias")
    assert [shard.name for shard in found.shards] == ["layers.0.0.weight", "layers.1.0.weight"]
    assert found.patterns == [("layers.*", 4), ("*.bias", 4)]
    head = find_shards(model, model["head"])
    assert [shard.name for shard in head.shards] == ["head.weight"]
    assert head.patterns == [(model["head"], 1)]


class Adapted(nn.Module):
    """A layer as PEFT wraps it: what is adapted, and the adapters by name."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4)})
        self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.ones(2, 4))})


@pytest.mark.parametrize("has_blocks", [True, False])
def test_adapters_are_pruned_only_if_they_are_named(has_blocks: bool) -> None:
    model = stage(2 if has_blocks else 0)
    path = "layers.0.0" if has_blocks else "head"
    parent, _, name = path.rpartition(".")
    before = [shard.name for shard in find_shards(model).shards]
    setattr(model.get_submodule(parent), name, Adapted(model.get_submodule(path)))
    assert [shard.name.replace(".base_layer", "") for shard in find_shards(model).shards] == before
    found = find_shards(model, "*.lora_*").shards
    assert [shard.name.removeprefix(f"{path}.") for shard in found] == [
        "lora_A.default.weight",
        "lora_A.default.bias",
        "lora_B.default.weight",
        "lora_B.default.bias",
        "lora_embedding_A.default",
    ]
    inside = find_shards(model, model.get_submodule(path)).shards
    assert len(inside) == 4  # what is named as a module, too


def holding(kind: type[nn.Module] = nn.Module, **shapes: tuple[int, ...]) -> nn.Module:
    """Return a module of a ``kind`` that holds parameters of these shapes."""
    module = kind()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.ones(shape)))
    return module


NO_WEIGHTS: list[tuple[str, nn.Module, dict[str, str]]] = [
    (
        "scales of quantized weights",
        holding(
            weight_scale_inv=(2, 2), weight_scale=(4, 1), weight_zero_point=(2, 2), gate_up_proj_scale_inv=(2, 2, 2)
        ),
        dict.fromkeys(("weight_scale_inv", "weight_scale", "weight_zero_point", "gate_up_proj_scale_inv"), "a scale"),
    ),
]


@pytest.mark.parametrize(("module", "left_out"), [row[1:] for row in NO_WEIGHTS], ids=[row[0] for row in NO_WEIGHTS])
def test_what_is_no_weight_is_left_out_by_default(module: nn.Module, left_out: dict[str, str]) -> None:
    module.register_parameter("weight", nn.Parameter(torch.ones(4, 4)))
    found = find_shards(module)
    assert [shard.name for shard in found.shards] == ["weight"]
    assert found.left_out == left_out
