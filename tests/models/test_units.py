"""What can be removed of a block: zeroing what reads the units is removing them, and what cannot go says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from distprune.models.units import UnitKind, find_all_units, find_units
from tests.architectures import samples, tiny_model
from tests.removal.sliced import SCRIPTS, kept_units, sliced


@pytest.mark.parametrize("name", SCRIPTS)
@torch.no_grad()
def test_readers_that_read_zeros_are_smaller_ones(name: str) -> None:
    script = SCRIPTS[name]
    model: Any = script.make()
    num_blocks = len(decoder_blocks(model))
    kept = kept_units(script, num_blocks)
    for key in kept:  # experts have no reader
        if key[1] == "experts":
            kept[key] = torch.arange(4)
    experts = {field: 4 for field in script.config if field in ("num_experts", "num_local_experts")}
    small: Any = sliced(script, kept, model, **experts)
    for (block_name, kind, place), index in kept.items():
        block = model.get_submodule(block_name)
        (units,) = [units for units in find_units(block, kind) if units.name == place]
        assert (units.num_units, units.num_groups) == script.units[kind, place][:2]
        if units.reader is None:
            continue
        linear = linear_layers(block)[units.reader]
        weight: torch.Tensor = linear.parameter
        weight = weight if linear.expert is None else weight[linear.expert]
        gone = torch.ones(units.num_units, dtype=torch.bool)
        gone[index] = False
        columns = units.reader_index[gone].flatten()  # type: ignore[index]
        (weight.t() if linear.transposed else weight)[:, columns] = 0
    tokens = samples(3)
    assert torch.allclose(model(tokens).logits, small(tokens).logits, atol=1e-4, rtol=1e-4)


def test_one_query_head_for_each_key_leaves_with_it() -> None:
    model = tiny_model("llama", num_key_value_heads=2)
    heads, groups = (find_all_units(model, kind)[0][1][0] for kind in ("heads", "kv_groups"))
    assert heads.num_groups == 1
    assert [cut.parameter for cut in heads.cuts] == [cut.parameter for cut in groups.cuts]


class Gated(nn.Module):
    """Experts whose gates and ups lie side by side."""

    is_transposed = True

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(3, 6, 10))
        self.gate_up_proj_bias = nn.Parameter(torch.ones(3, 10))
        self.down_proj = nn.Parameter(torch.ones(3, 5, 6))
        self.down_proj_bias = nn.Parameter(torch.ones(3, 6))
        self.interleaved = interleaved

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        return gate.sigmoid() * up

    @override
    def forward(self, hidden_states: torch.Tensor, router_indices: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.n_group = 2, 1
        self.weight, self.bias = nn.Parameter(torch.ones(3, 6)), nn.Parameter(torch.ones(3))
        self.register_buffer("e_score_correction_bias", torch.zeros(3))


def experts(interleaved: bool) -> nn.Module:
    block = nn.Module()
    block.mlp = nn.Module()
    block.mlp.router, block.mlp.experts = Router(), Gated(interleaved)
    return block


def test_channels_of_experts_lie_as_they_are_gated() -> None:
    for interleaved, second in ((True, [2, 3]), (False, [1, 6])):
        units = find_units(experts(interleaved), "mlp")
        assert [of.name for of in units] == [f"mlp.experts.{expert}" for expert in range(3)]
        cuts = {cut.parameter: cut for cut in units[2].cuts}
        assert {name: (cut.dim, cut.expert, cut.index[1].tolist()) for name, cut in cuts.items()} == {
            "mlp.experts.gate_up_proj": (2, 2, second),
            "mlp.experts.gate_up_proj_bias": (1, 2, second),
            "mlp.experts.down_proj": (1, 2, [1]),
        }


def test_experts_leave_with_all_that_is_theirs() -> None:
    (units,) = find_units(experts(False), "experts")
    assert (units.name, units.num_units, units.min_kept, units.reader) == ("mlp.experts", 3, 2, None)
    assert {cut.parameter: cut.dim for cut in units.cuts} == {
        "mlp.router.weight": 0,
        "mlp.router.bias": 0,
        "mlp.router.e_score_correction_bias": 0,
        "mlp.experts.gate_up_proj": 0,
        "mlp.experts.gate_up_proj_bias": 0,
        "mlp.experts.down_proj": 0,
        "mlp.experts.down_proj_bias": 0,
    }


class Attention(nn.Module):
    pass


def attention(**layers: nn.Module) -> nn.Module:
    block = nn.Module()
    block.attn = Attention()
    block.attn.head_dim = 4  # type: ignore[assignment]
    for name, layer in layers.items():
        setattr(block.attn, name, layer)
    return block


QKV = {"q": nn.Linear(6, 8), "k": nn.Linear(6, 4), "v": nn.Linear(6, 4), "out": nn.Linear(8, 6)}


@pytest.mark.parametrize(
    ("kind", "block", "message"),
    [
        ("heads", attention(c_attn=nn.Linear(6, 24), c_proj=nn.Linear(8, 6)), "c_attn, c_proj are not q, k, v and out"),
        ("kv_groups", attention(**QKV, gate=nn.Linear(6, 8)), "q, k, v, out, gate are not q, k, v and out"),
        ("heads", attention(**{**QKV, "q": nn.Linear(6, 16)}), "heads of 4 do not make up .*q 6 to 16"),
        ("heads", attention(**QKV, q_norm=nn.LayerNorm(8)), "'q_norm.weight' of shape \\(8,\\) belongs to all heads"),
        (
            "mlp",
            nn.ModuleDict({"up": nn.Linear(6, 8), "norm": nn.LayerNorm(8), "down": nn.Linear(8, 6)}),
            "'norm' norm",
        ),
        ("mlp", experts(False).requires_grad_(False), None),
        (
            "experts",
            nn.ModuleDict({"e": nn.ModuleList([nn.Linear(6, 6)] * 2), "gate": nn.Linear(6, 2)}),
            "module of its",
        ),
    ],
)
def test_what_cannot_be_removed_says_why(kind: UnitKind, block: nn.Module, message: str | None) -> None:
    if message is None:
        block.mlp.experts._apply_gate = lambda x: x.flip(-1)[..., :5] * x[..., :5]  # type: ignore[union-attr]
        message = "mixes gates and ups in an order"
    with pytest.raises(NotImplementedError, match=message):
        find_units(block, kind)


def test_a_square_mlp_is_read_by_what_is_called_so() -> None:
    def mlp(*names: str) -> nn.Module:
        return nn.ModuleDict({"mlp": nn.ModuleDict({name: nn.Linear(6, 6) for name in names})})

    assert [units.reader for units in find_units(mlp("gate", "up", "down_proj"), "mlp")] == ["mlp.down_proj"]
    assert find_units(mlp("w1", "w2", "w3"), "mlp") == []  # w2 reads


def test_an_attention_with_weights_of_its_own() -> None:
    block = attention(**QKV)
    block.attn.sinks = nn.Parameter(torch.zeros(2))  # type: ignore[union-attr]
    for kind, num_units, owned in (("heads", 2, [[0], [1]]), ("kv_groups", 1, [[0, 1]])):
        (units,) = find_units(block, kind)  # type: ignore[arg-type]
        (index,) = [cut.index.tolist() for cut in units.cuts if cut.parameter == "attn.sinks"]
        assert (units.num_units, index) == (num_units, owned)
    block.attn.lambda_q1 = nn.Parameter(torch.zeros(4))  # type: ignore[union-attr] # of pairs of heads
    with pytest.raises(NotImplementedError, match="'lambda_q1' of shape"):
        find_units(block, "heads")


def test_mixers_are_no_mlp_and_no_attention() -> None:
    block = nn.Module()
    block.mixer = nn.Module()
    block.mixer.in_proj, block.mixer.out_proj = nn.Linear(6, 16), nn.Linear(8, 6)
    assert [units.name for units in find_units(block, "mlp")] == ["mixer"]
    block.mixer.conv1d = nn.Conv1d(8, 8, 3, groups=8)
    assert find_units(block, "mlp") == []
    block.mixer.head_dim = 4  # type: ignore[assignment]
    assert find_units(block, "mlp") == find_units(block, "heads") == []


def test_kinds_are_named() -> None:
    with pytest.raises(ValueError, match="one of mlp, heads, kv_groups, experts, not 'rows'"):
        find_units(nn.Module(), "rows")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="no experts to remove: no block of LlamaForCausalLM has any"):
        find_all_units(tiny_model("llama"), "experts")
    with pytest.raises(NotImplementedError, match=r"block 'transformer.h.0': units of 'attn', a GPT2Attention"):
        find_all_units(tiny_model("gpt2"), "heads")
