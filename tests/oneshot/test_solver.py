"""A solver of one's own is arithmetic on rows: the driver places them, in every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from typing_extensions import override

from distprune import ADMM, Channels, PerRow, Unstructured
from distprune.calibration.moments import Moments, Needs
from distprune.models.linear_layers import linear_layers
from distprune.models.units import Units
from distprune.oneshot.damping import damped_factor
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Choose, Solved, Solver
from distprune.oneshot.sparsegpt import DAMPING, SparseGPT
from distprune.patterns.base import Pattern
from distprune.removal.criteria import OBS
from distprune.removal.readers import Asked
from distprune.removal.remover import UnitRemover
from distprune.scores.base import Elements, Score
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import matrices, sharded
from tests.worlds import run_threads
from tests.wrapped import whole

TOKENS = samples(4)


class Refitted(Solver):
    """Keeps the largest |w| ||x||, and scales what is left so that each row puts out as much as before."""

    needs: ClassVar[Needs] = "products"

    @override
    def solve(self, rows: Mapping[str, Rows], moments: Moments, pattern: Pattern, choose: Choose) -> dict[str, Solved]:
        keep = choose({name: of.weight.abs() * moments.norms for name, of in rows.items()}, pattern)
        assert moments.products is not None
        for name, of_layer in rows.items():
            before, pruned = of_layer.weight.clone(), of_layer.weight * keep[name]
            size = [((w @ moments.products) * w).sum(dim=1, keepdim=True) for w in (before, pruned)]
            of_layer.weight.copy_(pruned * (size[0] / size[1]).sqrt())
        return {name: Solved(mask) for name, mask in keep.items()}


def on_rank(_: int, make: Any) -> tuple[dict[str, torch.Tensor], list[float | None]]:
    model: nn.Module = make()
    report = prune_blocks(model, TOKENS, method=Refitted(), pattern=PerRow(0.5))
    assert report.method == "Refitted"
    return {n: whole(p) for n, p in model.named_parameters()}, [
        m.relative_error for b in report.blocks for m in b.layers
    ]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_ranks_do_what_one_does(architecture: str) -> None:
    make = partial(tiny_model, architecture)
    alone = make()
    report = prune_blocks(alone, TOKENS, method=Refitted(), pattern=PerRow(0.5))
    assert all(
        of_layer.num_pruned == of_layer.num_elements // 2 for block in report.blocks for of_layer in block.layers
    )
    assert all((weight == 0).sum(1).eq(weight.shape[1] // 2).all() for weight in matrices(alone).values())
    for weights, errors in run_threads(2, on_rank, lambda: sharded(make())):
        for name, weight in alone.named_parameters():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-5)
        assert errors == pytest.approx([m.relative_error for b in report.blocks for m in b.layers], rel=1e-3)


class Squared(Score):
    """As Wanda, of squares: another score of the same order."""

    needs = ("input_norm",)

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        return (elements.weight * elements["input_norm"]).square()


def test_a_score_of_ones_own_and_a_pattern_by_its_text() -> None:
    one, other = tiny_model("llama"), tiny_model("llama")
    report = prune_blocks(one, TOKENS, method=Squared(), pattern="row", sparsity=0.5)
    assert (report.method, report.pattern) == ("Squared", "PerRow(sparsity=0.5)")
    prune_blocks(other, TOKENS, method="wanda", pattern=Unstructured(0.5))
    for name, weight in matrices(one).items():
        assert float(((weight != 0) == (matrices(other)[name] != 0)).float().mean()) > 0.999
    with pytest.raises(NotImplementedError, match="SparseGPT decides block of columns by block of columns"):
        prune_blocks(one, TOKENS, method="sparsegpt", pattern=Channels(0.5, 0))
    with pytest.raises(NotImplementedError, match="ADMM decides rows, or blocks of weights"):
        prune_blocks(one, TOKENS, method="admm", pattern=Channels(0.5, 0))


def remover(num_kept: int) -> UnitRemover:
    """Return what removes all but ``num_kept`` of three inputs of ``up``."""
    linear = linear_layers(nn.Sequential(nn.Linear(3, 2, bias=False)))["0"]
    units = Units("mlp", "", 3, 1, (), "up", torch.arange(3)[:, None])
    return UnitRemover({"up": Asked("", units, num_kept, linear)}, OBS(), "least_squares")


def moments_of(products: torch.Tensor) -> Moments:
    ones = torch.ones(3).double()
    return Moments(("up",), 4, ones, ones, ones, products=products.double(), gram=torch.eye(3).double())


@pytest.mark.parametrize("solver", [ADMM(), SparseGPT(), remover(2)], ids=lambda of: type(of).__name__)
def test_damping_is_raised_or_the_layer_named(solver: Solver) -> None:
    """One rule for all that invert: what rounding or few tokens left indefinite is damped tenfold until it is not."""
    indefinite = torch.full((3, 3), 3.0).fill_diagonal_(1)
    assert all(bool(of.isfinite().all()) for of in solver.prepare(moments_of(indefinite)).values())
    with pytest.raises(ValueError, match=r"the 3 inputs of 'up' have no inverse, although the damping was raised"):
        solver.prepare(moments_of(torch.full((3, 3), torch.nan)))


def test_damping_is_raised_until_it_helps() -> None:
    assert SparseGPT().prepare(moments_of(torch.eye(3)))["damping"] == DAMPING
    products = torch.tensor([[1.0, 1.05, 1.0], [1.05, 1.0, 1.0], [1.0, 1.0, 1.0]])  # not positive semidefinite
    prepared = SparseGPT().prepare(moments_of(products))
    assert prepared["damping"] == 10 * DAMPING
    damped = 2 / 4 * (products + 10 * DAMPING * torch.eye(3))  # of 4 tokens
    torch.testing.assert_close(prepared["upper"].t() @ prepared["upper"] @ damped, torch.eye(3), rtol=0, atol=1e-4)


def factored_on_rank(_: int) -> None:
    prune_blocks(sharded(tiny_model("bloom")), TOKENS, method="admm", pattern="2:4")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_input_is_factored_by_one_rank(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """Once for the way to its target, once to be solved."""
    seen: list[str] = []

    def factor(products: torch.Tensor, damping: float, name: str, **others: Any) -> Any:
        seen.append(name)
        return damped_factor(products, damping, name, **others)

    for module in ("admm", "retarget"):
        monkeypatch.setattr(f"distprune.oneshot.{module}.damped_factor", factor)
    run_threads(num_ranks, factored_on_rank)
    of_block = {"self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}
    assert Counter(seen) == Counter(dict.fromkeys(of_block, 2 * 2))
