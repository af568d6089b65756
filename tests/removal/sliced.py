"""Removal by hand: dense tensors sliced by their names, one architecture after the other; knows nothing of distprune.

``SCRIPTS`` says what is removed of each tiny model, under the names of its modules; :func:`sliced` does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from distprune.models.units import UnitKind
from tests.architectures import tiny_model

__all__ = ["SCRIPTS", "Script", "kept_units", "sliced"]

Place = tuple[UnitKind, str]
Indices = dict[tuple[str, UnitKind, str], torch.Tensor]
State = dict[str, torch.Tensor]

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
    slice: Callable[[State, str, dict[Place, torch.Tensor]], None]
    only: dict[Place, int] = field(default_factory=dict)  # the block that has it, where not all do

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
        script.slice(state, f"{block}.", {(kind, place): of for (b, kind, place), of in kept.items() if b == block})
    config: Any = model.config
    changed = AutoConfig.for_model(**{**config.to_dict(), **script.config, **changes})
    small: nn.Module = AutoModelForCausalLM.from_config(changed, dtype=torch.float32).eval()
    small.load_state_dict(state)
    return small


def rows(state: State, name: str, index: torch.Tensor) -> None:
    state[name] = state[name][index]


def columns(state: State, name: str, index: torch.Tensor) -> None:
    state[name] = state[name][:, index]


def wide(index: torch.Tensor, width: int) -> torch.Tensor:
    """Return the elements of units of ``width`` elements."""
    return torch.cat([torch.arange(i * width, (i + 1) * width) for i in index.tolist()])


def slice_gated(state: State, block: str, place: str, index: torch.Tensor) -> None:
    rows(state, f"{block}{place}.gate_proj.weight", index)
    rows(state, f"{block}{place}.up_proj.weight", index)
    columns(state, f"{block}{place}.down_proj.weight", index)


def slice_attention(
    state: State, block: str, kept: dict[Place, torch.Tensor], head_dim: int, has_bias: bool = False
) -> None:
    """8 query heads, two for each of 4 key and value heads; their groups go, or one query head of each."""
    if ("kv_groups", "self_attn") in kept:
        groups = kept["kv_groups", "self_attn"]
        queries = wide(groups, 2 * head_dim)
        for name in ("k_proj", "v_proj"):
            for kind in ("weight", "bias") if has_bias else ("weight",):
                rows(state, f"{block}self_attn.{name}.{kind}", wide(groups, head_dim))
    else:
        queries = wide(kept["heads", "self_attn"], head_dim)
    for kind in ("weight", "bias") if has_bias else ("weight",):
        rows(state, f"{block}self_attn.q_proj.{kind}", queries)
    columns(state, f"{block}self_attn.o_proj.weight", queries)


def slice_llama(head_dim: int, has_bias: bool = False) -> Callable[..., None]:
    def slice_block(state: State, block: str, kept: dict[Place, torch.Tensor]) -> None:
        slice_attention(state, block, kept, head_dim, has_bias)
        slice_gated(state, block, "mlp", kept["mlp", "mlp"])

    return slice_block


def slice_phi3(state: State, block: str, kept: dict[Place, torch.Tensor]) -> None:
    channels, head_dim, num_heads, num_kv = kept["mlp", "mlp"], 4, 8, 4
    rows(state, f"{block}mlp.gate_up_proj.weight", torch.cat([channels, 40 + channels]))
    columns(state, f"{block}mlp.down_proj.weight", channels)
    if ("heads", "self_attn") in kept:
        queries, groups = wide(kept["heads", "self_attn"], head_dim), torch.arange(num_kv)
    else:
        groups = kept["kv_groups", "self_attn"]
        queries = wide(groups, 2 * head_dim)
    keys = num_heads * head_dim + wide(groups, head_dim)
    fused = torch.cat([queries, keys, keys + num_kv * head_dim])
    rows(state, f"{block}self_attn.qkv_proj.weight", fused)
    columns(state, f"{block}self_attn.o_proj.weight", queries)


def slice_opt(state: State, block: str, kept: dict[Place, torch.Tensor]) -> None:
    rows(state, f"{block}fc1.weight", kept["mlp", ""])
    rows(state, f"{block}fc1.bias", kept["mlp", ""])
    columns(state, f"{block}fc2.weight", kept["mlp", ""])


def slice_gpt2(state: State, block: str, kept: dict[Place, torch.Tensor]) -> None:
    columns(state, f"{block}mlp.c_fc.weight", kept["mlp", "mlp"])  # kept as (in, out)
    rows(state, f"{block}mlp.c_fc.bias", kept["mlp", "mlp"])
    rows(state, f"{block}mlp.c_proj.weight", kept["mlp", "mlp"])


def slice_neox(state: State, block: str, kept: dict[Place, torch.Tensor]) -> None:
    rows(state, f"{block}mlp.dense_h_to_4h.weight", kept["mlp", "mlp"])
    if f"{block}mlp.dense_h_to_4h.bias" in state:
        rows(state, f"{block}mlp.dense_h_to_4h.bias", kept["mlp", "mlp"])
    columns(state, f"{block}mlp.dense_4h_to_h.weight", kept["mlp", "mlp"])


def slice_experts(num_channels: int) -> Callable[..., None]:
    def slice_block(state: State, block: str, kept: dict[Place, torch.Tensor]) -> None:
        slice_attention(state, block, kept, 4, f"{block}self_attn.q_proj.bias" in state)
        if ("mlp", "mlp") in kept:
            slice_gated(state, block, "mlp", kept["mlp", "mlp"])
        if ("mlp", "mlp.shared_expert") in kept:
            slice_gated(state, block, "mlp.shared_expert", kept["mlp", "mlp.shared_expert"])
        if ("experts", "mlp.experts") not in kept:
            return
        up, down = state[f"{block}mlp.experts.gate_up_proj"], state[f"{block}mlp.experts.down_proj"]
        ups, downs = [], []
        for expert in kept["experts", "mlp.experts"].tolist():
            channels = kept["mlp", f"mlp.experts.{expert}"]
            ups.append(up[expert][torch.cat([channels, num_channels + channels])])
            downs.append(down[expert][:, channels])
        state[f"{block}mlp.experts.gate_up_proj"] = torch.stack(ups)
        state[f"{block}mlp.experts.down_proj"] = torch.stack(downs)
        rows(state, f"{block}mlp.gate.weight", kept["experts", "mlp.experts"])

    return slice_block


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
_PHI3 = {**_GROUPED, "intermediate_size": 40, "num_hidden_layers": 2}
_FALCON = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 32, "ffn_hidden_size": 40}

SCRIPTS: dict[str, Script] = {
    "llama": Script("llama", _GROUPED, "model.layers", _KV_GROUPS, _FEWER_GROUPS, slice_llama(4)),
    "llama-heads": Script("llama", _GROUPED, "model.layers", _HEADS, _FEWER_HEADS, slice_llama(4)),
    "qwen2": Script("qwen2", _GROUPED, "model.layers", _KV_GROUPS, _FEWER_GROUPS, slice_llama(4, has_bias=True)),
    "qwen3": Script("qwen3", _GROUPED, "model.layers", _HEADS, {**_FEWER_HEADS, "head_dim": 8}, slice_llama(8)),
    "gemma": Script("gemma", _GROUPED, "model.layers", _KV_GROUPS, {**_FEWER_GROUPS, "head_dim": 16}, slice_llama(16)),
    "phi3": Script("phi3", _PHI3, "model.layers", _HEADS, _FEWER_HEADS, slice_phi3),
    "phi3-groups": Script("phi3", _PHI3, "model.layers", _KV_GROUPS, _FEWER_GROUPS, slice_phi3),
    "opt": Script("opt", {}, "model.decoder.layers", {("mlp", ""): (40, 1, 28)}, {"ffn_dim": 28}, slice_opt),
    "gpt2": Script("gpt2", {}, "transformer.h", {("mlp", "mlp"): (96, 1, 60)}, {"n_inner": 60}, slice_gpt2),
    "gpt_neox": Script(
        "gpt_neox", {}, "gpt_neox.layers", {("mlp", "mlp"): (40, 1, 28)}, {"intermediate_size": 28}, slice_neox
    ),
    "falcon": Script(
        "falcon", _FALCON, "transformer.h", {("mlp", "mlp"): (40, 1, 28)}, {"ffn_hidden_size": 28}, slice_neox
    ),
    "mixtral": Script(
        "mixtral", _GROUPED, "model.layers", _MIXTRAL, {**_FEWER_GROUPS, "num_local_experts": 3}, slice_experts(40)
    ),
    "qwen2_moe": Script("qwen2_moe", _GROUPED, "model.layers", _QWEN_MOE, _FEWER_QWEN_MOE, slice_experts(16), _MIXED),
}
