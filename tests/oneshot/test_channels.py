"""Which channels of a block can change places, in every architecture: its model puts out the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from distprune import l1_unstructured
from distprune.collectives.communicator import Alone
from distprune.models.decoder_blocks import decoder_blocks
from distprune.oneshot.channel_order import MovableChannels, find_channels, move_channels
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model

TOKENS = samples(3)
_SIZES: dict[str, Any] = {**ONE_SHOT_ARCHITECTURES["llama"], "head_dim": 8, "num_key_value_heads": 2}
_OF_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# What is changed in the configuration, and what reads channels that can change places.
READERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({}, {"self_attn.o_proj", "mlp.down_proj"}),
    "qwen2": ({}, {"self_attn.o_proj", "mlp.down_proj"}),  # its values have biases
    "qwen3": ({"num_key_value_heads": 2}, {"self_attn.o_proj", "mlp.down_proj"}),  # queries and keys are normalized
    "gemma": ({}, {"self_attn.o_proj", "mlp.down_proj"}),  # heads larger than hidden_size / num_heads
    "phi": ({}, {"self_attn.dense", "mlp.fc2"}),
    "phi3": (_SIZES, {"self_attn.o_proj", "mlp.down_proj"}),  # queries, keys and values in one; gates and ups, too
    "opt": ({}, {"self_attn.out_proj", "fc2"}),
    "gpt2": ({}, {"mlp.c_proj"}),  # and here an order that nothing says
    "mixtral": ({}, {"self_attn.o_proj"}),  # experts keep theirs
    "gpt_oss": ({**_SIZES, **_OF_EXPERTS}, {"self_attn.o_proj"}),
    "olmo2": (_SIZES, {"mlp.down_proj"}),  # a norm over the queries of all heads
    "bitnet": ({**_SIZES, "head_dim": 12}, set()),  # norms over all channels
    "diffllama": (_SIZES, {"mlp.down_proj"}),  # values of two heads are mixed
}


def channels_of(model: nn.Module, m: int = 4) -> Iterator[tuple[nn.Module, MovableChannels]]:
    """Yield all channels that can change places, with their blocks."""
    for _, block in decoder_blocks(model):
        for channels in find_channels(model, block, names(block), m).values():
            yield block, channels


def turned(channels: MovableChannels) -> torch.Tensor:
    """Return the order in which those of each head are turned around."""
    return torch.arange(channels.num_channels).view(channels.num_heads, -1).flip(1).flatten()


def names(block: nn.Module) -> list[str]:
    return [name for name, _ in block.named_modules()]


@pytest.mark.parametrize("architecture", READERS)
def test_a_model_puts_out_the_same(architecture: str) -> None:
    changes, readers = READERS[architecture]
    model = tiny_model(architecture, **changes)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            found: Any = model(input_ids=TOKENS, use_cache=False).logits
            return found  # type: ignore[no-any-return]

    before, found = logits(), list(channels_of(model))
    assert {channels.reader for _, channels in found} == readers
    for block, channels in found:
        weights = [block.get_parameter(cut.parameter).detach().clone() for cut in channels.cuts]
        move_channels(Alone(), block, channels, turned(channels))
        for cut, weight in zip(channels.cuts, weights, strict=True):
            moved = block.get_parameter(cut.parameter)
            assert not torch.equal(moved, weight) or not weight.any()
            if channels.num_heads == 1 and cut.index.shape == (weight.shape[cut.dim], 1):
                assert torch.equal(moved, weight.flip(cut.dim))
    torch.testing.assert_close(logits(), before, rtol=1e-4, atol=1e-5)


def found_in(block: nn.Module, model: nn.Module, m: int = 4) -> set[str]:
    return {*find_channels(model, block, names(block), m)}


def test_others_must_fit() -> None:
    """Groups of M, more than one; and those whose reader is pruned."""
    model = tiny_model("llama", head_dim=8)
    block = decoder_blocks(model)[0][1]
    for m, readers in ((4, {"self_attn.o_proj", "mlp.down_proj"}), (8, {"mlp.down_proj"}), (40, set()), (3, set())):
        assert found_in(block, model, m) == readers
    assert {*find_channels(model, block, ["mlp.down_proj", "mlp.up_proj"], 4)} == {"mlp.down_proj"}


def _adapter(module: nn.Module) -> None:
    module.adapter = nn.Linear(40, 3, bias=False)


def _more(name: str, *shape: int) -> Any:
    return lambda module: module.register_parameter(name, nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("mlp", _adapter),
        ("mlp.up_proj", _more("magnitude", 40)),
        ("mlp.gate_proj", lambda of: l1_unstructured(of, "weight", 0.5)),
        ("self_attn", _adapter),
        ("self_attn.v_proj", _more("magnitude", 12)),
        ("self_attn.o_proj", _more("magnitude", 24)),
        ("self_attn.v_proj", lambda of: of.register_buffer("mask", torch.ones(12, 24))),
        ("self_attn.o_proj", lambda of: l1_unstructured(of, "weight", 0.5)),
        ("self_attn", lambda of: of.register_module("v_norm", nn.LayerNorm(12))),
        ("self_attn", lambda of: setattr(of, "is_kv_shared_layer", False)),  # whose values a later block may read
    ],
)
def test_what_is_not_known_keeps_its_order(place: str, change: Any) -> None:
    model = tiny_model("llama")
    block = decoder_blocks(model)[0][1]
    change(block.get_submodule(place))
    reader = "mlp.down_proj" if place.startswith("mlp") else "self_attn.o_proj"
    assert found_in(block, model) == {"self_attn.o_proj", "mlp.down_proj"} - {reader}


@pytest.mark.parametrize(
    ("name", "reader"), [("mlp.up_proj", "mlp.down_proj"), ("self_attn.v_proj", "self_attn.o_proj")]
)
def test_shared_weights_keep_their_order(name: str, reader: str) -> None:
    model = tiny_model("llama")
    (_, block), (_, other), _ = decoder_blocks(model)
    other.get_submodule(name).weight = block.get_submodule(name).weight
    assert found_in(block, model) == {"self_attn.o_proj", "mlp.down_proj"} - {reader}
