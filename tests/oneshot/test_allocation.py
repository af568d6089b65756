"""Shares by gradients are the oracle's on one rank and the same on several; nothing stays changed, nobody waits."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from distprune import allocate, perplexity, prune_blocks
from distprune.calibration.sensitivity import measure_sensitivities
from distprune.collectives.communicator import Alone
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from distprune.oneshot.allocation import Bounds, below_one_threshold, whole_rows_of
from tests import allocation_oracle as oracle
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.families import family_model, tokens
from tests.oneshot.alike import TOKENS, matrices, sharded
from tests.oneshot.test_tensor_parallel import make, wrapped
from tests.worlds import ProcessPool, all_raise

SHARE = 0.6


def check_found(model: nn.Module, found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    """Each within one weight a row; all together within half the rows of the smallest layer."""
    shapes = {name: weight.shape for name, weight in matrices(model).items()}
    assert found.keys() == expected.keys() == shapes.keys()
    for name, (_, num_in) in shapes.items():
        assert abs(found[name] - expected[name]) * num_in < 1.01
        assert found[name] * num_in == pytest.approx(round(found[name] * num_in))
        assert 0.45 <= found[name] <= 0.75
    total = sum(shape.numel() for shape in shapes.values())
    pruned = sum(round(found[name] * num_in) * num_out for name, (num_out, num_in) in shapes.items())
    assert abs(pruned - round(SHARE * total)) <= min(num_out for num_out, _ in shapes.values()) / 2


def state_of(model: nn.Module) -> list[Any]:
    modules = [(m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks), list(vars(m))) for m in model.modules()]
    parameters = [(p.requires_grad, p.grad is None, p._version) for p in model.parameters()]
    return [modules, parameters, torch.get_rng_state().tolist(), torch.is_grad_enabled()]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi", "opt", "gpt2", "mixtral", "qwen2_moe"])
@pytest.mark.sampled(3)
def test_equals_the_oracle(architecture: str) -> None:
    model = tiny_model(architecture)
    expected = oracle.allocate(model, TOKENS, SHARE)
    model.train()
    first, *others = model.parameters()
    first.requires_grad_(False)
    others[0].grad = torch.ones_like(others[0])
    before = state_of(model)
    with torch.no_grad():
        found = allocate(model, TOKENS, SHARE)
    assert state_of(model)[:3] == before[:3]
    assert torch.equal(others[0].grad, torch.ones_like(others[0]))
    check_found(model, found, expected)
    assert len(set(found.values())) > 2
    report = prune_blocks(model, TOKENS, method="wanda", pattern="row", sparsity=found)
    for of_layer in (of_layer for block in report.blocks for of_layer in block.layers):
        assert of_layer.num_pruned == round(found[of_layer.name] * of_layer.num_elements)


@pytest.mark.parametrize("architecture", ["bloom", "mixtral"])
def test_batches_come_to_the_same(architecture: str) -> None:
    found = [allocate(tiny_model(architecture), TOKENS, SHARE, batch_tokens=num) for num in (1, 40)]
    assert found[1] == pytest.approx(found[0], abs=0.05)


EXPERTS = {**ONE_SHOT_ARCHITECTURES["mixtral"], "head_dim": 8}


def test_experts_with_biases_and_transposed_weights() -> None:
    """Of two tokens one is predicted: in the last block the gradient of a bias is that of one token's output."""
    model: Any = tiny_model("gpt_oss", **EXPERTS)
    tokens = samples(1, 2)
    _, block = decoder_blocks(model)[1]
    found = measure_sensitivities(Alone(), model, linear_layers(block), tokens)
    logits = model(input_ids=tokens, use_cache=False).logits
    torch.autograd.backward(nn.functional.cross_entropy(logits[0, :1], tokens[0, 1:]))
    experts = model.model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        for expert, gradient in enumerate(getattr(experts, f"{name}_bias").grad):
            outputs = found[f"mlp.experts.{name}.{expert}"].outputs
            torch.testing.assert_close(outputs, gradient.square(), rtol=1e-3, atol=1e-9)


def test_experts_that_are_called_otherwise() -> None:
    model = tiny_model("llama4_text", **EXPERTS, intermediate_size_mlp=40)
    with pytest.raises(NotImplementedError, match=r"'model.layers.0.feed_forward.experts' \(Llama4Text"):
        allocate(model, TOKENS, SHARE)


def test_experts_without_tokens_have_the_uniform_share() -> None:
    model, tokens = tiny_model("mixtral"), samples(1, 2)
    found = allocate(model, tokens, SHARE)
    check_found(model, found, oracle.allocate(model, tokens, SHARE))
    report = prune_blocks(model, tokens, method="wanda", pattern="row", sparsity=found)
    unseen = [of_layer for block in report.blocks for of_layer in block.layers if not of_layer.num_tokens]
    assert unseen
    for of_layer in unseen:
        assert of_layer.num_pruned / of_layer.num_elements == found[of_layer.name] == pytest.approx(SHARE, abs=0.03)


def test_layers_without_gradients_have_the_uniform_share() -> None:
    """The indexer of attention says which keys count, and the loss feels nothing else of it."""
    model: Any = family_model("deepseek_v32")
    found = allocate(model, tokens(3, 12), SHARE)
    indexers = {name: share for name, share in found.items() if ".indexer." in name}
    assert indexers == {name: pytest.approx(SHARE, abs=0.03) for name in indexers}
    sizes = {name: model.get_submodule(name).weight.numel() for name in indexers}
    assert len(sizes) == 9
    assert len(set(found.values())) > 3


def on_rank(_: int, layout: str, architecture: str, tokens: torch.Tensor) -> dict[str, float]:
    model: Any
    if layout == "plain":
        model = tiny_model(architecture)
    elif layout in ("fsdp2", "hsdp"):
        model = sharded(tiny_model(architecture), (2, 2) if layout == "hsdp" else None)
        perplexity(model, tokens.flatten(), sequence_length=tokens.shape[1])  # what is gathered wants gradients
    else:
        model = wrapped(layout, architecture)
    model.requires_grad_(True)
    found = allocate(model, tokens, SHARE)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    if layout in ("fsdp2", "hsdp"):
        model(input_ids=tokens[:1], use_cache=False).logits.square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
    return found


@pytest.mark.parametrize(
    ("world_size", "layout", "architecture"),
    [
        (2, "plain", "llama"),
        (2, "fsdp2", "gpt2"),
        (3, "fsdp2", "mixtral"),
        (4, "hsdp", "llama"),
        (2, "tp", "mixtral-attention"),
        (4, "fsdp-columns-tp", "llama"),
    ],
)
@pytest.mark.sampled(1)
def test_ranks_come_to_what_one_does(pool: ProcessPool, world_size: int, layout: str, architecture: str) -> None:
    first, *others = pool.run(world_size, on_rank, layout, architecture, TOKENS)
    assert all(other == first for other in others)
    model = make(architecture) if "tp" in layout else tiny_model(architecture)
    expected = allocate(model, TOKENS, SHARE)
    check_found(model, first, expected)
    assert sum(first[name] == expected[name] for name in first) >= 0.9 * len(first)


def not_finite(rank: int, where: str, shard: bool) -> None:
    """Samples 1 and 3 are rank 1's."""
    model: Any = tiny_model("llama")

    def spoil(_: nn.Module, __: Any, output: Any) -> Any:
        if where == "loss":
            return output * torch.nan
        output.register_hook(lambda gradient: gradient * torch.inf)
        return output

    if rank == 1:
        (model.lm_head if where == "loss" else model.model.norm).register_forward_hook(spoil)
    allocate(sharded(model) if shard else model, TOKENS, SHARE)


@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize(
    ("where", "match"),
    [("loss", "samples 1, 3 is nan"), ("gradient", "'model.layers.0.self_attn.q_proj': NaN or Inf in")],
)
@pytest.mark.sampled(2)
def test_not_finite(where: str, match: str, shard: bool) -> None:
    all_raise(2, not_finite, where, shard, match=match)


@pytest.mark.parametrize("sparsity", [0.0, 0.05, 0.95, 1.0])
def test_shares_stay_shares(sparsity: float) -> None:
    shares = allocate(tiny_model("llama"), TOKENS[:1], sparsity)
    assert all(0 <= share <= 1 and abs(share - sparsity) <= 0.15 for share in shares.values())


@pytest.mark.parametrize("seed", range(20))
def test_budgets_are_met(seed: int) -> None:
    """By one threshold: what is not at a bound has the same highest bin pruned, and the others a reason."""
    draw = random.Random(seed)
    num_out = [draw.choice([2, 3, 5, 8]) for _ in range(8)]
    in_rows: list[Bounds] = [(draw.randint(0, 4), draw.randint(5, 12)) for _ in num_out]
    bounds: list[Bounds] = [(low * rows, high * rows) for (low, high), rows in zip(in_rows, num_out, strict=True)]
    bins = [[draw.randrange(draw.choice([20, 50])) for _ in range(12 * rows)] for rows in num_out]
    histograms = torch.stack([torch.bincount(torch.tensor(of_layer), minlength=50) for of_layer in bins])
    budget = draw.randint(*(sum(pair[i] for pair in bounds) for i in (0, 1)))
    counts = below_one_threshold(histograms, bounds, budget)
    assert sum(counts) == pytest.approx(budget, abs=1e-4)
    assert all(low <= count <= high for (low, high), count in zip(bounds, counts, strict=True))
    # No bin that is pruned in part or whole, although it need not be, lies above one that is kept although it could go.
    below = torch.nn.functional.pad(histograms.cumsum(1), (1, 0)).double()
    pruned = [
        int((of < count - 1e-6).sum()) for of, count, (low, _) in zip(below, counts, bounds, strict=True) if count > low
    ]
    kept = [
        int((of <= count + 1e-6).sum())
        for of, count, (_, high) in zip(below, counts, bounds, strict=True)
        if count < high
    ]
    assert max(pruned, default=0) <= min(kept, default=50)
    rows_of = whole_rows_of(counts, num_out, in_rows, budget)
    for rows, (low, high), count, num in zip(rows_of, in_rows, counts, num_out, strict=True):
        assert low <= rows <= high
        assert abs(rows - count / num) <= 1
    assert abs(sum(map(math.prod, zip(rows_of, num_out, strict=True))) - budget) < max(num_out)
