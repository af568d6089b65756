"""Which parameters are meant, and what the caller must know to decide for all ranks together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

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


def holding(**shapes: tuple[int, ...]) -> nn.Module:
    """Return a module that holds parameters of these shapes."""
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.ones(shape)))
    return module


SCALES = {"weight_scale": (4, 1), "weight_scale_inv": (2, 2), "weight_zero_point": (2, 2), "proj_scale_inv": (2, 2, 2)}


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        (SCALES, "a scale"),  # of quantized weights
        ({"gain": (1, 4, 1, 1), "gamma": (1, 1, 4), "alpha_weight": (1, 4, 1), "one": (1, 1)}, "a vector"),
        ({"rel_pos_h": (3, 2), "rel_pos_w": (3, 2), "pos_v": (3, 2)}, "an embedding"),  # tables of positions by an axis
    ],
)
def test_what_is_no_weight_is_left_out_by_default(shapes: dict[str, tuple[int, ...]], why: str) -> None:
    found = find_shards(holding(**shapes, weight=(4, 4)))
    assert [shard.name for shard in found.shards] == ["weight"]
    assert found.left_out == dict.fromkeys(shapes, why)


@pytest.mark.parametrize(
    ("name", "is_norm"),
    [
        ("CohereLayerNorm", True),
        ("RMSNormGated", True),
        ("Norm2d", True),
        ("FSDPLlamaRMSNorm", True),
        ("NemotronLayerNorm1P", True),
        ("LayerNormLinear", False),  # TransformerEngine's
        ("LinearNorm", False),  # Tacotron's: a linear layer
        ("CosNorm_Classifier", False),
        ("NormFace", False),
        ("NormProduct", False),
        ("NormDense", False),
        ("WeightNormDense", False),
        ("SpectralNormDense", False),
        ("NormalizedLinear", False),
        ("PreNormFeedForward", False),
        ("Experts", False),
    ],
)
def test_norms_are_told_by_their_class(name: str, is_norm: bool) -> None:
    """Gains of Command-R's norms of queries and keys have two dims: a row for each head."""
    for base in (nn.Module, type(name, (nn.Module,), {})):  # itself, or what it derives from
        norm: nn.Module = type(name if base is nn.Module else "Other", (base,), {})()
        norm.weight = nn.Parameter(torch.ones(2, 4))
        assert find_shards(norm).left_out == ({"weight": "the gain of a norm"} if is_norm else {})


def test_vectors_of_layers_are_weights() -> None:
    layers = [nn.Linear(4, 1), nn.Conv2d(1, 4, 1), nn.ConvTranspose1d(1, 4, 1), nn.LSTM(1, 4), nn.GRUCell(1, 4)]
    found = find_shards(nn.ModuleList(layers))
    assert not found.left_out
    assert len(found.shards) == 7


def test_letters_are_weights_beside_layers() -> None:
    """As in XLNet's attention, where each of q, k, v, o and r is one; but not as a word of a name."""
    attention = holding(
        q=(4, 2, 2), k=(4, 2, 2), v=(4, 2, 2), o=(4, 2, 2), r=(4, 2, 2), r_k=(4, 2), seg_embed=(2, 2, 2)
    )
    attention.layer = nn.Linear(2, 2)
    found = find_shards(attention)
    assert [shard.name for shard in found.shards] == ["q", "k", "v", "o", "r", "layer.weight"]
    assert found.left_out == {"r_k": "kept beside layers, no weight by its name", "seg_embed": "an embedding"}


@pytest.mark.parametrize("name", ["router", "gate"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5)),  # an MLP, and an expert that skips the block (Zaya)
        lambda: nn.ModuleDict({"gate": nn.Linear(8, 4, bias=False)}),  # torchtitan
        lambda: holding(weight=(4, 8)),  # Megatron
        lambda: holding(weight=(6, 8)),  # two shared experts (Inkling)
    ],
)
def test_routers_are_told_by_their_names_beside_experts(name: str, make: Callable[[], nn.Module]) -> None:
    experts = holding(w1=(4, 6, 8), w2=(4, 8, 6))
    model = nn.ModuleDict({"experts": experts, name: make(), "other": nn.ModuleDict({name: nn.Linear(8, 8)})})
    found = find_shards(model)
    assert [shard.name for shard in found.shards] == ["experts.w1", "experts.w2", f"other.{name}.weight"]
    assert {*found.left_out.values()} == {"a router"}


@pytest.mark.parametrize(
    ("name", "child", "are_experts"),
    [
        ("experts", holding(weight1=(8, 64), weight2=(64, 8)), True),  # Megatron's
        ("shared_experts", nn.Linear(8, 8), True),
        ("expert_mlps", nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), True),
        ("expert_group", holding(up_proj=(4, 6, 8), down_proj=(4, 8, 6)), True),
        ("expert_encoder", nn.Linear(8, 8), False),
        ("expert_filter", nn.Conv1d(8, 8, 3), False),
    ],
)
def test_a_gate_is_a_router_only_beside_experts(name: str, child: nn.Module, are_experts: bool) -> None:
    model = nn.ModuleDict({name: child, "gate": nn.Linear(8, 8)})
    assert find_shards(model).left_out == ({"gate.weight": "a router"} if are_experts else {})


class TunerLayer(nn.Module):
    """As PEFT's layers for any kind of adapter: what they adapt, which may be such a layer, and parameters by name."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.hada_w1_a = nn.ParameterDict({"default": nn.Parameter(torch.ones(4, 2))})
        self.oft_R = nn.ModuleDict({"default": nn.Linear(4, 4)})

    def get_base_layer(self) -> nn.Module:
        return self.base_layer.get_base_layer() if isinstance(self.base_layer, TunerLayer) else self.base_layer


def test_adapters_of_peft_are_told_by_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PEFT: tests/masks/test_peft.py has its own."""
    adapted = nn.Sequential(nn.Linear(4, 4), TunerLayer(TunerLayer(nn.Linear(4, 4))))
    monkeypatch.setitem(sys.modules, "peft.tuners.tuners_utils", SimpleNamespace(BaseTunerLayer=TunerLayer))
    found = find_shards(adapted)
    assert [shard.name for shard in found.shards] == ["0.weight", "1.base_layer.base_layer.weight"]
    assert {*found.left_out.values()} == {"an adapter"}
    assert len(found.left_out) == 4
    assert len(find_shards(adapted, adapted[1]).shards) == 5  # what is named as a module, too
