"""A solver of one's own is arithmetic on rows: the driver places them, in every layout."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from typing_extensions import override

from distprune import ADMM, Channels, PerRow, Unstructured
from distprune.calibration.moments import Moments, MomentsOf
from distprune.models.linear_layers import linear_layers
from distprune.models.units import Units
from distprune.oneshot.damping import damped_factor
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Pruning, Solved, Solver
from distprune.oneshot.sparsegpt import SparseGPT
from distprune.patterns.base import Pattern
from distprune.removal.criteria import OBS
from distprune.removal.remover import Asked, UnitRemover
from distprune.scores.base import Elements, Score
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import matrices, sharded
from tests.worlds import run_threads
from tests.wrapped import whole

TOKENS = samples(4)


@dataclass(frozen=True)
class Refitted(Solver[Moments]):
    """Keeps the largest |w| ||x||, and scales what is left so that each row puts out as much as before."""

    needs: ClassVar[MomentsOf] = "pairs"

    @override
    def prepare(self, moments: Moments) -> Moments:
        return moments

    @override
    def begin(self, rows: Mapping[str, Rows], prepared: Moments, pattern: Pattern) -> Pruning:
        assert isinstance(pattern, PerRow)
        return Refitting(rows, prepared, pattern)


@dataclass
class Refitting(Pruning):
    rows: Mapping[str, Rows]
    moments: Moments
    pattern: PerRow

    @override
    def finish(self) -> dict[str, Solved]:
        assert isinstance(self.pattern.sparsity, float)
        solved = {}
        for name, of_layer in self.rows.items():
            before = of_layer.weight.clone()
            scores = before.abs() * self.moments.square_sums.sqrt()
            keep = scores > scores.kthvalue(round(self.pattern.sparsity * scores.shape[1]), dim=1, keepdim=True).values
            pruned = before * keep
            size = [((w @ self.moments.values) * w).sum(dim=1, keepdim=True) for w in (before, pruned)]
            of_layer.weight.copy_(pruned * (size[0] / size[1]).sqrt())
            solved[name] = Solved(int((~keep).sum()), self.moments.squared_output(before - of_layer.weight))
        return solved


def on_rank(_: int, make: Any) -> tuple[dict[str, torch.Tensor], list[float | None]]:
    model: nn.Module = make()
    report = prune_blocks(model, TOKENS, method=Refitted(), pattern=PerRow(0.5))
    assert report.method == "Refitted"
    return {n: whole(p) for n, p in model.named_parameters()}, [
        m.relative_error for b in report.blocks for m in b.layers
    ]


@pytest.mark.parametrize("architecture", ["llama", "bloom"])  # of bloom's inputs the widest is spread
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


@pytest.mark.parametrize("solver", [ADMM(), SparseGPT()], ids=str)
@pytest.mark.parametrize("num_in", [1, 2, 7, 8])
def test_what_is_sent_is_what_was_prepared(solver: Solver[Any], num_in: int) -> None:
    x = torch.randn(40, num_in, generator=torch.Generator().manual_seed(num_in))
    x[:, num_in // 2] = 0
    upper = (x.t() @ x).triu()  # not every BLAS makes the product symmetric to the bit, as moments are
    moments = Moments(("up",), 40, upper + upper.triu(1).t())
    prepared = solver.prepare(dataclasses.replace(moments, values=moments.values.clone()))
    rows = Rows(torch.zeros(3, num_in), ((0, 3),), 3, owned=True)
    packed, like = solver.pack(prepared), solver.sent_like(rows)
    assert [(of.dtype, of.shape) for of in packed] == [(of.dtype, of.shape) for of in solver.pack(like)]
    again = solver.unpack(like, packed, moments)
    sent = dict(vars(again))
    sent |= {name: sent[name].triu() for name in ("upper",) if name in sent}  # no more of it is read
    for name, value in vars(prepared).items():
        assert torch.equal(torch.as_tensor(sent[name]), torch.as_tensor(value)), name
        if isinstance(value, torch.Tensor) and num_in > 1:  # where it lies otherwise, a product may round otherwise
            assert vars(again)[name].stride() == value.stride(), name


def remover(num_kept: int) -> UnitRemover:
    """Return what removes all but ``num_kept`` of three inputs of ``up``."""
    linear = linear_layers(nn.Sequential(nn.Linear(3, 2, bias=False)))["0"]
    units = Units("mlp", "", 3, 1, (), "up", torch.arange(3)[:, None])
    return UnitRemover({"up": Asked("", units, num_kept, linear)}, "", OBS(), "least_squares")


def moments_of(products: torch.Tensor) -> Moments:
    return Moments(("up",), 4, products, sums=torch.zeros(3, 3).double(), gram=torch.eye(3).double())


@pytest.mark.parametrize("solver", [ADMM(), SparseGPT(), remover(2)], ids=lambda of: type(of).__name__)
def test_damping_is_raised_or_the_layer_named(solver: Solver[Any]) -> None:
    """One rule for all that invert: what rounding or few tokens left indefinite is damped tenfold until it is not."""
    indefinite = torch.full((3, 3), 3.0).fill_diagonal_(1)
    prepared = solver.prepare(moments_of(indefinite))
    assert all(bool(of.isfinite().all()) for of in vars(prepared).values() if isinstance(of, torch.Tensor))
    with pytest.raises(ValueError, match=r"the 3 inputs of 'up' have no inverse, although the damping was raised"):
        solver.prepare(moments_of(torch.full((3, 3), torch.nan)))


def factored_on_rank(_: int) -> None:
    prune_blocks(sharded(tiny_model("bloom")), TOKENS, method="admm", pattern="2:4")


@pytest.mark.parametrize("num_ranks", [1, 3])  # of bloom's inputs the widest is spread
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
