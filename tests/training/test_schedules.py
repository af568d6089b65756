"""What a schedule asks for after the last step is said; sparsities of their own for every parameter."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.training.schedules import at_once, constant, cubic, erk_of_shapes
from distprune.training.sparse_training import SparseTraining
from tests.training.optimizers import INCLUDE
from tests.worlds import ProcessPool
from tests.wrapped import pairs_of, transformer, whole, wrap


@pytest.mark.parametrize(
    ("how", "num_steps", "said"),
    [
        ({"schedule": cubic(0.8, stop=40, every=10)}, 40, "after 40 steps with the schedule at 0.7875, .* on to 0.8:"),
        ({"schedule": cubic(0.8, stop=40, every=10)}, 35, "after 35 steps with the schedule at 0.7875, .* on to 0.8:"),
        ({"schedule": cubic(0.8, stop=40, every=10)}, 41, ""),
        ({"schedule": cubic(0.8, stop=40)}, 40, ""),  # less than a weight is missing
        ({"schedule": {"weight": constant(0.5), "bias": cubic(0.5, stop=9, every=3)}, "include": "*"}, 9, "at 0.4815,"),
        ({"schedule": at_once(0.5, step=3), "pattern": "2:4"}, 3, "with the schedule at 0, and it goes on to 0.5:"),
        ({"schedule": at_once(0.5, step=3), "pattern": "2:4"}, 4, ""),
        ({"schedule": constant(0.5)}, 1, ""),
        ({"schedule": constant(0.5)}, 0, ""),
    ],
)
def test_what_a_schedule_has_left_is_said(how: dict[str, Any], num_steps: int, said: str) -> None:
    """By a callback as well: it finishes in the same way."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = SparseTraining(model, optimizer, **how)
    for _ in range(num_steps):
        model(torch.ones(8)).sum().backward()
        optimizer.step()
    with pytest.warns(UserWarning, match=said) if said else contextlib.nullcontext():
        training.finish()


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
