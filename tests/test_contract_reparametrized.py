"""The promise for ``torch.nn.utils.prune``'s methods: every script, in every layout, equals the oracle with ``==``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import distprune as prune
from tests.contract import COLUMNS, REPARAMETRIZED, SCRIPTS, Script, Wholes
from tests.layouts import LAYOUTS, Layout
from tests.sampling import Combination, over_layouts
from tests.test_contract import SHAPES, Holder, local, whole_model
from tests.worlds import run_threads

MATRICES = tuple(shape for shape in SHAPES if len(shape) >= 2)
VALUES = (
    ("normal", torch.float32),
    ("ties", torch.bfloat16),
    ("same", torch.float32),
    ("infinite", torch.float16),
    ("normal", torch.float64),
)
Case = tuple[Script, Wholes, list[Wholes]]


@functools.cache
def made(script: Script, kind: str, dtype: torch.dtype, with_scalars: bool) -> Case:
    """Return a script, values, and the oracle's masks after every step."""
    shapes = SHAPES if with_scalars else tuple(shape for shape in SHAPES if shape)
    values = whole_model(kind, dtype, script.shapes or (MATRICES if script.needs_matrices else shapes))
    masks = {name: torch.ones(value.shape, dtype=torch.bool) for name, value in values.items()}
    expected = []
    for step in script.steps:
        masks = step.oracle(values, masks)
        expected.append(masks)
    return script, values, expected


def check_rank(
    rank: int,
    layout: Layout,
    world_size: int,
    cases: list[Case],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    spread = layout.make(world_size)
    for script, values, expected in cases:
        held = Holder({name: spread(i, whole) for i, (name, whole) in enumerate(values.items())})
        before = dict(held.named_parameters())
        pairs: list[tuple[nn.Module, str]] = [(held, name) for name in values]
        for step, masks in zip(script.steps, expected, strict=True):
            with around():
                step.call(pairs, values)
            for i, (name, whole) in enumerate(masks.items()):
                where = f"{layout.name} {world_size=} {rank=} {script.name} {step.row} {name} {values[name].dtype}"
                mask, wanted = held.get_buffer(name + "_mask"), spread(i, whole.to(torch.int8))
                assert wanted is not None
                assert held.get_parameter(name + "_orig") is before[name], where
                assert torch.equal(local(mask) == 1, local(wanted) == 1), where
                if isinstance(wanted, DTensor):
                    assert isinstance(mask, DTensor), where
                    assert (mask.dtype, mask.placements, mask.shape) == (torch.bool, wanted.placements, wanted.shape)
                else:
                    assert mask.dtype is values[name].dtype, where
        for i, (name, whole) in enumerate(expected[-1].items()):
            with around():
                prune.remove(held, name)
            wanted = spread(i, values[name].masked_fill(~whole, 0))
            assert wanted is not None
            kept = local(wanted) != 0  # what was infinite and is pruned is NaN on plain modules, as in PyTorch
            assert held.get_parameter(name) is before[name]
            assert torch.equal(local(held.get_parameter(name))[kept], local(wanted)[kept])
        assert not prune.is_pruned(held)


NAMES = {layout for column in REPARAMETRIZED for layout in COLUMNS[column]}


@pytest.mark.parametrize(
    ("layout", "world_size", "combinations"),
    over_layouts(SCRIPTS, VALUES, layouts=[layout for layout in LAYOUTS if layout.name in NAMES]),
)
@pytest.mark.sampled(4)
def test_equals_single_process(layout: Layout, world_size: int, combinations: list[Combination]) -> None:
    with_scalars = layout.name != "last-half"  # outside of a mesh torch gives a scalar one dim
    cases = [made(script, kind, dtype, with_scalars) for script, (kind, dtype) in combinations]
    run_threads(world_size, check_rank, layout, world_size, cases)


def test_every_layout_stands_for_something() -> None:
    assert {layout for layouts in COLUMNS.values() for layout in layouts} == {layout.name for layout in LAYOUTS}
