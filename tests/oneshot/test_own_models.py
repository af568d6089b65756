"""Models that people write are pruned as their plain equals are, or refused before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from distprune import allocate, prune_blocks
from tests.worlds import drawing

TOKENS = torch.randint(60, (9, 16), generator=torch.Generator().manual_seed(1))
SCALE = torch.linspace(0.01, 10, 32)


class Block(nn.Module):
    """``way``: how it is called, or computes what it does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm, self.up, self.down = way, nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        if way == "other keyword":
            self.up.__class__ = Renamed
        if way == "nothing":
            self.narrow, self.wide = (nn.Linear(1, 1, bias=False, device="meta") for _ in range(2))
            self.narrow.weight, self.wide.weight = (nn.Parameter(torch.empty(size)) for size in ((0, 32), (32, 0)))
        if way == "input hooked":
            self.up.register_forward_pre_hook(lambda _, args: (args[0] * SCALE,))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) * SCALE if self.way == "input scaled" else self.norm(x)
        made = nn.functional.gelu(self.up(renamed=x) if self.way == "other keyword" else self.up(x))
        if self.way == "gated by neighbours":
            made = (made[..., ::2, None] * made[..., 1::2, None]).expand(*made.shape[:-1], 32, 2).flatten(-2)
        if self.way == "normalized":
            made = nn.functional.layer_norm(made.view(*made.shape[:-1], 4, 16), (16,)).flatten(-2)
        put_out: torch.Tensor = self.down(made)
        return put_out

    @override
    def forward(self, x: torch.Tensor, skipped: torch.Tensor | None = None, mask: Any = None) -> torch.Tensor:
        if self.way == "in place":
            x += self.mlp(x)
            return x
        x = x if skipped is None else x + skipped
        if self.way == "flat, whole inside":
            return x + self.mlp(x.view(-1, 16, 32)).flatten(0, 1)
        return x + self.mlp(x) + (self.wide(self.narrow(x)) if self.way == "nothing" else 0)


class Renamed(nn.Linear):
    @override
    def forward(self, renamed: torch.Tensor) -> torch.Tensor:
        return super().forward(renamed)


class Model(nn.Module):
    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        with drawing(0):
            self.embed, self.head = nn.Embedding(60, 32), nn.Linear(32, 60)
            blocks = [Block(way) for _ in range(3)]
        self.layers = nn.ModuleList(blocks[:1] * 3 if way == "one block thrice" else blocks)

    @override
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        shape = x.shape
        if self.way.startswith("flat"):
            x = x.flatten(0, 1)
        before = None
        for layer in self.layers:
            given = x
            if self.way == "keywords":
                x = layer(mask=torch.zeros(16, 16), x=x)
            elif self.way == "reentrant":
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x, before) if self.way == "skips" else layer(x)
            before = given
        logits: torch.Tensor = self.head(x.view(shape))
        return logits


def pruned(way: str, dtype: torch.dtype = torch.float32, **how: Any) -> list[torch.Tensor]:
    model = Model(way).to(dtype)
    if dtype != torch.float32:  # of one token, as models have them
        model.embed.weight.data[TOKENS[0, 0], 3] = 300.0
    prune_blocks(model, TOKENS, **how)
    return [parameter.detach() for parameter in model.layers.parameters()]


def check_alike(way: str, plain: str = "", **how: Any) -> None:
    weights, expected = pruned(way, **how), pruned(plain, **how)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "admm"])
@pytest.mark.parametrize("way", ["in place", "flat", "flat, whole inside", "keywords", "other keyword"])
def test_pruned_as_the_plain_one(way: str, method: str) -> None:
    fits = {"refit": "none"} if method == "admm" and way == "in place" else {}  # torch has no gradients there
    check_alike(way, sparsity=0.5, method=method, **fits)


def test_a_hook_that_changes_the_input() -> None:
    check_alike("input hooked", "input scaled", sparsity=0.5, method="wanda")
    assert allocate(Model("input hooked"), TOKENS, 0.5) == allocate(Model("input scaled"), TOKENS, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("method", "pattern"), [("wanda", "7:8"), ("admm", "2:4")])
@pytest.mark.parametrize("way", ["gated by neighbours", "normalized"])
def test_channels_that_are_no_channels_keep_their_order(way: str, method: str, pattern: Any, dtype: Any) -> None:
    with pytest.warns(UserWarning, match="channels of a Block keep their order: another changes its output"):
        weights = pruned(way, dtype, method=method, pattern=pattern, permute="channels")
    expected = pruned(way, dtype, method=method, pattern=pattern, permute="none")
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_channels_move_without_a_warning(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruned("", dtype, method="wanda", pattern="2:4", permute="channels")


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "prune_blocks": lambda model: prune_blocks(model, TOKENS, 0.5, method="wanda"),
    "allocate": lambda model: allocate(model, TOKENS, 0.5),
}


@pytest.mark.parametrize(
    ("way", "call", "error", "match"),
    [
        ("skips", "prune_blocks", NotImplementedError, "'layers.2' is given more of what the one before puts out"),
        ("one block thrice", "prune_blocks", NotImplementedError, "in Model's list more than once"),
        ("one block thrice", "allocate", NotImplementedError, "in Model's list more than once"),
        ("reentrant", "allocate", NotImplementedError, "no gradient reaches the logits.*use_reentrant=False works"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_refused(way: str, call: str, error: type[Exception], match: str) -> None:
    model, before = Model(way), Model(way).state_dict()
    with pytest.raises(error, match=match):
        CALLS[call](model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_of_no_weights_have_the_uniform_share() -> None:
    model, expected = Model("nothing"), allocate(Model(), TOKENS, 0.5)
    shares = allocate(model, TOKENS, 0.5)
    assert {name: share for name, share in shares.items() if share != 0.5 or name in expected} == expected
    report = prune_blocks(model, TOKENS, shares, method="wanda")
    assert report.sparsity == 0.5
    assert [layer.sparsity for layer in report.blocks[0].layers if not layer.num_elements] == [0.0, 0.0]
