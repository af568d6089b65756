"""Removal by hand: dense tensors sliced by their names, one architecture after the other; knows nothing of distprune.

``SCRIPTS`` says what is removed of each tiny model, under the names of its modules; :func:`sliced` does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from distprune.models.units import UnitKind
from tests.architectures import tiny_model

__all__ = ["SCRIPTS", "Script", "kept_units", "sliced"]

Place = tuple[UnitKind, str]
Indices = dict[tuple[str, UnitKind, str], torch.Tensor]
State = dict[str, torch.Tensor]
Layers = Iterator[tuple[str, Literal["in", "out"], torch.Tensor]]  # which of their inputs or outputs stay

_GROUPED = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4}


@dataclass(frozen=True)
class Script:
    """``units`` by (kind, place): how many there are, in how many groups, and how many of each group stay; ``blocks``:
    what the names of blocks begin with. ``config``: the fields that say so afterwards."""

    architecture: str
    sizes: dict[str, Any]
    blocks: str
    units: dict[Place, tuple[int, int, int]]
    config: dict[str, Any]
    layers: Callable[[dict[Place, torch.Tensor]], Layers]
    only: dict[Place, int] = field(default_factory=dict)  # the block that has it, where not all do
    transposed: bool = False  # layers keep weights as (in, out)

    def make(self) -> nn.Module:
        return tiny_model(self.architecture, **self.sizes)


def kept_units(script: Script, num_blocks: int, seed: int = 3) -> Indices:
    """Return which units stay, drawn for every block."""
    generator = torch.Generator().manual_seed(seed)
    found: Indices = {}
    for block in range(num_blocks):
        for (kind, place), (num_units, num_groups, num_kept) in script.units.items():
            if script.only.get((kind, place), block) != block:
                continue
            size = num_units // num_groups
            drawn = [torch.randperm(size, generator=generator)[:num_kept].sort().values for _ in range(num_groups)]
            found[f"{script.blocks}.{block}", kind, place] = torch.cat(
                [group * size + of_group for group, of_group in enumerate(drawn)]
            )
    return found


def sliced(script: Script, kept: Indices, model: nn.Module, **changes: Any) -> nn.Module:
    """Return the model of the smaller configuration with the slices of ``model``'s tensors; every name must fit.

    ``changes`` are to that configuration.
    """
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for block in dict.fromkeys(block for block, _, _ in kept):
        of_block = {(kind, place): index for (b, kind, place), index in kept.items() if b == block}
        for layer, side, index in script.layers(of_block):
            name = f"{block}.{layer}"
            if f"{name}.weight" not in state:
                continue  # it is in other blocks
            dim = int((side == "in") != script.transposed)
            state[f"{name}.weight"] = state[f"{name}.weight"].index_select(dim, index)
            if side == "out" and f"{name}.bias" in state:
                state[f"{name}.bias"] = state[f"{name}.bias"][index]
        if ("experts", "mlp.experts") in of_block:
            slice_experts(state, f"{block}.mlp", of_block)
    config: Any = model.config
    changed = AutoConfig.for_model(**{**config.to_dict(), **script.config, **changes})
    small: nn.Module = AutoModelForCausalLM.from_config(changed, dtype=torch.float32).eval()
    small.load_state_dict(state)
    return small


def wide(index: torch.Tensor, width: int) -> torch.Tensor:
    """Return the elements of units of ``width`` elements."""
    return torch.cat([torch.arange(i * width, (i + 1) * width) for i in index.tolist()])


def heads_of(kept: dict[Place, torch.Tensor], head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of queries, and of keys and values, that stay.

    There are 8 query heads, two for each of 4 key and value heads; their groups go, or one query head of each.
    """
    groups = kept.get(("kv_groups", "self_attn"), torch.arange(4))
    heads = kept.get(("heads", "self_attn"), wide(groups, 2))
    return wide(heads, head_dim), wide(groups, head_dim)


def llama_like(head_dim: int, *mlps: str) -> Callable[[dict[Place, torch.Tensor]], Layers]:
    def layers(kept: dict[Place, torch.Tensor]) -> Layers:
        queries, keys = heads_of(kept, head_dim)
        yield from (("self_attn.q_proj", "out", queries), ("self_attn.o_proj", "in", queries))
        yield from (("self_attn.k_proj", "out", keys), ("self_attn.v_proj", "out", keys))
        for place in mlps:
            if ("mlp", place) in kept:
                channels = kept["mlp", place]
                yield from ((f"{place}.{maker}_proj", "out", channels) for maker in ("gate", "up"))
                yield f"{place}.down_proj", "in", channels

    return layers


def phi3(kept: dict[Place, torch.Tensor]) -> Layers:
    channels, (queries, keys) = kept["mlp", "mlp"], heads_of(kept, 4)
    yield from (("mlp.gate_up_proj", "out", torch.cat([channels, 40 + channels])), ("mlp.down_proj", "in", channels))
    yield "self_attn.qkv_proj", "out", torch.cat([queries, 32 + keys, 48 + keys])
    yield "self_attn.o_proj", "in", queries


def two_layers(place: str, maker: str, reader: str) -> Callable[[dict[Place, torch.Tensor]], Layers]:
    return lambda kept: iter([(maker, "out", kept["mlp", place]), (reader, "in", kept["mlp", place])])


def slice_experts(state: State, place: str, kept: dict[Place, torch.Tensor]) -> None:
    up, down = state[f"{place}.experts.gate_up_proj"], state[f"{place}.experts.down_proj"]
    ups, downs = [], []
    for expert in kept["experts", "mlp.experts"].tolist():
        channels = kept["mlp", f"mlp.experts.{expert}"]
        ups.append(up[expert][torch.cat([channels, down.shape[2] + channels])])
        downs.append(down[expert][:, channels])
    state[f"{place}.experts.gate_up_proj"], state[f"{place}.experts.down_proj"] = torch.stack(ups), torch.stack(downs)
    state[f"{place}.gate.weight"] = state[f"{place}.gate.weight"][kept["experts", "mlp.experts"]]


_HEADS: dict[Place, tuple[int, int, int]] = {("mlp", "mlp"): (40, 1, 28), ("heads", "self_attn"): (8, 4, 1)}
_KV_GROUPS: dict[Place, tuple[int, int, int]] = {("mlp", "mlp"): (40, 1, 28), ("kv_groups", "self_attn"): (4, 1, 2)}
_FEWER_HEADS = {"intermediate_size": 28, "num_attention_heads": 4, "head_dim": 4}
_FEWER_GROUPS = {**_FEWER_HEADS, "num_key_value_heads": 2}
_MIXTRAL: dict[Place, tuple[int, int, int]] = {
    ("experts", "mlp.experts"): (4, 1, 3),
    **{("mlp", f"mlp.experts.{expert}"): (40, 1, 28) for expert in range(4)},
    ("kv_groups", "self_attn"): (4, 1, 2),
}
_QWEN_MOE: dict[Place, tuple[int, int, int]] = {
    ("experts", "mlp.experts"): (4, 1, 3),
    **{("mlp", f"mlp.experts.{expert}"): (16, 1, 12) for expert in range(4)},
    ("mlp", "mlp.shared_expert"): (32, 1, 20),
    ("mlp", "mlp"): (40, 1, 28),
    ("heads", "self_attn"): (8, 4, 1),
}
_FEWER_QWEN_MOE = {
    "num_experts": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "intermediate_size": 28,
    "num_attention_heads": 4,
    "head_dim": 4,
}
_MIXED: dict[Place, int] = {place: 0 for place in _QWEN_MOE if "mlp." in place[1]} | {("mlp", "mlp"): 1}
_CHANNELS: dict[Place, tuple[int, int, int]] = {("mlp", "mlp"): (40, 1, 28)}
_WIDE: dict[Place, tuple[int, int, int]] = {("mlp", "mlp"): (96, 1, 60)}
_OPT: dict[Place, tuple[int, int, int]] = {("mlp", ""): (40, 1, 28)}
_GPT2 = two_layers("mlp", "mlp.c_fc", "mlp.c_proj")
_NEOX = two_layers("mlp", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_PHI3 = {**_GROUPED, "intermediate_size": 40, "num_hidden_layers": 2}
_FALCON = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 32, "ffn_hidden_size": 40}

SCRIPTS: dict[str, Script] = {
    "llama": Script("llama", _GROUPED, "model.layers", _KV_GROUPS, _FEWER_GROUPS, llama_like(4, "mlp")),
    "llama-heads": Script("llama", _GROUPED, "model.layers", _HEADS, _FEWER_HEADS, llama_like(4, "mlp")),
    "qwen2": Script("qwen2", _GROUPED, "model.layers", _KV_GROUPS, _FEWER_GROUPS, llama_like(4, "mlp")),
    "qwen3": Script("qwen3", _GROUPED, "model.layers", _HEADS, {**_FEWER_HEADS, "head_dim": 8}, llama_like(8, "mlp")),
    "gemma": Script(
        "gemma", _GROUPED, "model.layers", _KV_GROUPS, {**_FEWER_GROUPS, "head_dim": 16}, llama_like(16, "mlp")
    ),
    "phi3": Script("phi3", _PHI3, "model.layers", _HEADS, _FEWER_HEADS, phi3),
    "phi3-groups": Script("phi3", _PHI3, "model.layers", _KV_GROUPS, _FEWER_GROUPS, phi3),
    "opt": Script("opt", {}, "model.decoder.layers", _OPT, {"ffn_dim": 28}, two_layers("", "fc1", "fc2")),
    "gpt2": Script("gpt2", {}, "transformer.h", _WIDE, {"n_inner": 60}, _GPT2, transposed=True),
    "gpt_neox": Script("gpt_neox", {}, "gpt_neox.layers", _CHANNELS, {"intermediate_size": 28}, _NEOX),
    "falcon": Script("falcon", _FALCON, "transformer.h", _CHANNELS, {"ffn_hidden_size": 28}, _NEOX),
    "mixtral": Script(
        "mixtral", _GROUPED, "model.layers", _MIXTRAL, {**_FEWER_GROUPS, "num_local_experts": 3}, llama_like(4)
    ),
    "qwen2_moe": Script(
        *("qwen2_moe", _GROUPED, "model.layers", _QWEN_MOE, _FEWER_QWEN_MOE),
        llama_like(4, "mlp", "mlp.shared_expert"),
        _MIXED,
    ),
}
