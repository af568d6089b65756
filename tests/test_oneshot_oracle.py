"""The one-shot oracle itself: exact counts on every architecture, and the papers' formulas on small numbers."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch

from distprune.models.decoder_blocks import decoder_blocks
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.oneshot_oracle import linears, prune_model
from tests.solver_oracle import COLUMNS, NM, sparsegpt, wanda_mask

TOKENS = samples(3)
PATTERNS: list[float | NM] = [0.5, NM(2, 4)]


def check_counts(keep: torch.Tensor, method: str, pattern: float | NM) -> None:
    num_in = keep.shape[1]
    if isinstance(pattern, NM):
        assert (keep.reshape(-1, pattern.m).sum(1) == pattern.n).all()
    elif method == "wanda":
        assert ((~keep).sum(1) == round(pattern * num_in)).all()
    else:
        for block in torch.split(keep, COLUMNS, dim=1):
            assert int((~block).sum()) == round(pattern * block.numel())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
@pytest.mark.sampled(20)
def test_counts_on_every_architecture(
    architecture: str, method: Literal["wanda", "sparsegpt"], pattern: float | NM
) -> None:
    model: Any = tiny_model(architecture)
    with torch.no_grad():
        before = model(input_ids=TOKENS).logits
        masks = prune_model(model, TOKENS, method, pattern)
        after = model(input_ids=TOKENS).logits
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)
    assert len(masks) >= 8  # four layers in two blocks at least
    weights = {
        f"{at}.{name}": lin.weight for at, block in decoder_blocks(model) for name, lin in linears(block).items()
    }
    assert weights.keys() == masks.keys()
    for name, keep in masks.items():
        check_counts(keep, method, pattern)
        assert (weights[name][~keep] == 0).all()


def test_wanda_by_hand() -> None:
    weight = torch.tensor([[1.0, -2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 2.0]])
    norms = torch.tensor([10.0, 1.0, 1.0, 1.0])
    assert wanda_mask(weight, norms, 0.5).tolist() == [[True, False, False, True], [True, False, False, True]]
    assert wanda_mask(weight, norms, NM(1, 2)).tolist() == [[True, False, False, True], [True, False, False, True]]


def test_sparsegpt_with_white_inputs_is_magnitude() -> None:
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    new, keep = sparsegpt(weight, torch.eye(16, dtype=torch.float64), 0.5)
    assert torch.equal(new, weight * keep)
    assert weight[keep].abs().min() >= weight[~keep].abs().max()


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_sparsegpt_reconstructs_better_than_wanda(pattern: float | NM) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 24, generator=generator) @ torch.randn(24, 64, generator=generator)
    x += 0.3 * torch.randn(512, 64, generator=generator)
    weight = torch.randn(32, 64, generator=generator)
    hessian = (x.T @ x).double()
    new, keep = sparsegpt(weight, hessian, pattern)
    check_counts(keep, "sparsegpt", pattern)
    wanda = weight * wanda_mask(weight, x.norm(dim=0), pattern)
    assert (x @ (new - weight).T).norm() < 0.7 * (x @ (wanda - weight).T).norm()


def test_sparsegpt_does_not_depend_on_lazy_updates() -> None:
    """With N:M the columns of a block set only when errors are propagated, not what comes out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 32, generator=generator, dtype=torch.float64)
    weight = torch.randn(8, 32, generator=generator, dtype=torch.float64)
    whole, parts = (sparsegpt(weight, x.T @ x, NM(2, 4), columns=columns) for columns in (32, 8))
    assert torch.equal(whole[1], parts[1])
    torch.testing.assert_close(whole[0], parts[0])


def test_sparsegpt_given_the_mask_is_close_to_least_squares() -> None:
    """One column pruned: the optimal brain surgeon's answer, exactly, up to the damping."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 4, generator=generator, dtype=torch.float64)
    weight = torch.tensor([[1e-3, 1.0, 2.0, 3.0]], dtype=torch.float64)
    new, keep = sparsegpt(weight, x.T @ x, 0.25, damping=1e-9)
    assert keep.tolist() == [[False, True, True, True]]
    best = torch.linalg.lstsq(x[:, 1:], x @ weight[0]).solution
    torch.testing.assert_close(new[0, 1:], best, rtol=1e-6, atol=1e-9)


def test_dead_inputs_are_zeroed() -> None:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 3] = 0
    new, keep = sparsegpt(torch.full((2, 8), 5.0, dtype=torch.float64), x.T @ x, 0.5)
    assert (new[:, 3] == 0).all()
    assert not keep[:, 3].any()


def test_a_copy_is_pruned_alike() -> None:
    model = tiny_model("llama")
    one, other = (prune_model(m, TOKENS, "sparsegpt", 0.5) for m in (model, copy.deepcopy(tiny_model("llama"))))
    assert all(torch.equal(one[name], other[name]) for name in one)
