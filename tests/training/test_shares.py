"""Sparsities of their own for every parameter."""

from __future__ import annotations

import doctest
import math

import pytest
import torch

import distprune as prune
from distprune.training import schedules, shares
from distprune.training.shares import erk_of_shapes
from tests.training.optimizers import INCLUDE
from tests.worlds import ProcessPool
from tests.wrapped import pairs_of, transformer, whole, wrap


@pytest.mark.parametrize("module", [schedules, shares])
def test_examples(module: object) -> None:
    names = {**vars(module), "torch": torch}
    tests = [test for test in doctest.DocTestFinder().find(module, globs=names) if test.examples]
    assert tests
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0


def test_erk_is_its_formula() -> None:
    shapes = {"conv": (16, 8, 3, 3), "wide": (64, 512), "deep": (512, 512), "small": (4, 4)}
    found = erk_of_shapes(shapes, 0.9)
    densities = {name: 1 - share for name, share in found.items()}
    assert densities["small"] == 1  # would be denser than that
    raw = {name: sum(shape) / math.prod(shape) for name, shape in shapes.items()}
    ratio = {name: densities[name] / raw[name] for name in ("conv", "wide", "deep")}
    assert max(ratio.values()) == pytest.approx(min(ratio.values()))
    num_kept = sum(densities[name] * math.prod(shape) for name, shape in shapes.items())
    assert num_kept == pytest.approx(0.1 * sum(map(math.prod, shapes.values())))


def prune_on_rank(_: int, layout: str, pattern: str) -> list[torch.Tensor]:
    model = wrap(layout, transformer()).model
    report = prune.prune_model(model, prune.erk(model, 0.6, include=INCLUDE), pattern=pattern, include=INCLUDE)
    assert report.sparsity == pytest.approx(0.6, abs=0.03)
    return [whole(module.get_parameter(name)) for module, name in pairs_of(model)]


@pytest.mark.parametrize("pattern", ["unstructured", "row", "channels:0"])
@pytest.mark.sampled(1)
def test_each_parameter_as_if_alone(pool: ProcessPool, pattern: str) -> None:
    model = transformer()
    for name, share in prune.erk(model, 0.6, include=INCLUDE).items():
        prune.prune_model(model, share, pattern=pattern, include=name)
    expected = [module.get_parameter(name) for module, name in pairs_of(model)]
    for num_ranks, layout in ((2, "ddp"), (2, "fsdp2"), (4, "fsdp-tp")):
        for weights in pool.run(num_ranks, prune_on_rank, layout, pattern):
            assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"sparsity": {"up.weight": 0.5}}, ValueError, "there is no sparsity for"),
        ({"sparsity": {"up.weight": 1.5}}, ValueError, "outside"),
        ({"sparsity": {"up.weight": "half"}}, TypeError, "must be a float"),
        ({"sparsity": {"up.weight": 0.5}, "scope": "global"}, ValueError, "goes with scope='tensor'"),
        ({"sparsity": {"up.weight": 0.5}, "pattern": "row"}, ValueError, "there is no sparsity for"),
    ],
)
def test_bad_input(arguments: dict[str, object], error: type[Exception], says: str) -> None:
    model = transformer()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(error, match=says):
        prune.prune_model(model, **arguments)  # type: ignore[arg-type]
    assert all(map(torch.equal, model.parameters(), before))
