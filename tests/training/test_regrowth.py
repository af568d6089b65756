"""Weights move within their pattern: in every layout those that the plain answer moves, however often.

Schedules: what they ask for after the last step is said; sparsities of their own for every parameter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.collectives.communicator import Alone
from distprune.patterns.base import Pattern
from distprune.training.regrowth import Counts, GrowBy, Regrow
from distprune.training.schedules import at_once, constant, cubic, erk_of_shapes
from distprune.training.sparse_training import SparseTraining
from tests.contract import FITTING
from tests.layouts import Layout
from tests.oracle import random_scores
from tests.sampling import Combination, over_layouts
from tests.test_contract import Holder, local
from tests.training.optimizers import INCLUDE
from tests.worlds import ProcessPool, drawing, run_threads
from tests.wrapped import pairs_of, transformer, whole, wrap

SHARE = 0.4
PATTERNS: tuple[Pattern, ...] = (
    prune.Unstructured(0.6, "tensor"),
    prune.NByM(2, 4),
    prune.NByM(1, 2),
    prune.PerRow(0.55),
    prune.Block(2, 0.5, "tensor"),
    prune.Channels(0.5, 0),
    prune.Channels(0.5, -1),
)
BYS: tuple[GrowBy, ...] = ("gradient", "random")
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
Wholes = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; ``after``: what it is after each move; ``moved``: how many have grown."""

    pattern: Pattern
    bys: Sequence[GrowBy]  # of move i, i modulo their number, as of what follows
    start: Wholes
    values: list[Wholes]  # what training has made of it
    gradients: list[Wholes]
    after: list[Wholes]
    moved: list[int]


def whole_numbers(seed: int, dtype: torch.dtype, largest: int, shapes: Sequence[tuple[int, int]] = FITTING) -> Wholes:
    """Return parameters of whole numbers, whose sums are exact, with zeros and ties among them."""
    with drawing(seed):
        return {f"p{i}": torch.randint(-largest, largest + 1, shape).to(dtype) for i, shape in enumerate(shapes)}


def cells_of(pattern: Pattern, shape: Sequence[int]) -> tuple[torch.Tensor, Callable[[int], int]]:
    """Return the number of the cell that each weight is in, which moves as a whole, and what a cell competes in."""
    rows, columns = torch.arange(shape[0])[:, None], torch.arange(shape[1])[None]
    single = rows * shape[1] + columns
    if isinstance(pattern, prune.Block):
        return rows // pattern.size * (shape[1] // pattern.size) + columns // pattern.size, lambda _: 0
    if isinstance(pattern, prune.Channels):
        return (rows if pattern.dim == 0 else columns).expand(*shape), lambda _: 0
    if isinstance(pattern, prune.NByM):
        return single, lambda cell: cell // pattern.m
    return single, (lambda cell: cell // shape[1]) if isinstance(pattern, prune.PerRow) else lambda _: 0


def kept_after(pattern: Pattern, weight: torch.Tensor, growth: torch.Tensor) -> torch.Tensor:
    """Return what is kept after a move, written plainly."""
    cell_of, group_of = cells_of(pattern, weight.shape)
    num = int(cell_of.max()) + 1 if cell_of.numel() else 0

    def summed(values: torch.Tensor) -> list[float]:
        return torch.zeros(num, dtype=torch.float64).index_add(0, cell_of.flatten(), values.double().flatten()).tolist()

    def by_group(cells: Sequence[int], of: Callable[[int], int]) -> Iterator[list[int]]:
        for group in {of(cell) for cell in cells}:
            yield [cell for cell in cells if of(cell) == group]

    sizes, wants = summed(weight.abs()), summed(growth)
    kept = [cell for cell, num_kept in enumerate(summed(~is_held(weight))) if num_kept]
    left: list[int] = []
    for cells in by_group(kept, group_of if isinstance(pattern, prune.PerRow) else lambda _: 0):
        left += sorted(cells, key=lambda cell: (sizes[cell], cell))[round(SHARE * len(cells)) :]
    after: list[int] = []
    for cells in by_group(range(num), group_of):
        order = sorted(cells, key=lambda cell: (cell in left, wants[cell], cell))
        after += order[len(cells) - len({*cells}.intersection(kept)) :]
    return torch.isin(cell_of, torch.tensor(after, dtype=torch.int64))


def is_held(weight: torch.Tensor) -> torch.Tensor:
    return (weight == 0) & ~weight.signbit()


def trained(weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return what steps may make of ``weight``: what is held stays, and others that become zero are -0.0."""
    return torch.where(is_held(weight), weight, torch.where(values == 0, -0.0, values))


def made(
    pattern: Pattern,
    bys: Sequence[GrowBy],
    dtype: torch.dtype,
    num_moves: int,
    shapes: Sequence[tuple[int, int]] = FITTING,
) -> Case:
    values = [whole_numbers(seed, dtype, 9, shapes) for seed in range(3)]
    gradients = [{n: of / 4 for n, of in whole_numbers(seed, dtype, 5, shapes).items()} for seed in range(3, 6)]
    for of_tensor in () if isinstance(pattern, prune.Block | prune.Channels) else gradients[1].values():
        of_tensor[of_tensor > 1] = torch.inf  # it grows first, and not before what is left
    model = Holder({**values[0]})
    prune.prune_model(model, pattern=pattern, include="*", group=Alone())
    now = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    case = Case(pattern, bys, now, values, gradients, [], [])
    for move in range(num_moves):
        after, num_moved = {}, 0
        for name, weight in now.items():
            before, growth = trained(weight, values[move % 3][name]), gradients[move % 3][name].abs()
            if bys[move % len(bys)] == "random":
                growth = random_scores(name, growth.shape, move)
            keep = kept_after(pattern, before, growth)
            num_moved += int((keep & is_held(before)).sum())
            after[name] = before.masked_fill(~keep, 0.0).masked_fill(keep & (before == 0), -0.0)
        now = after
        case.after.append(now)
        case.moved.append(num_moved)
    return case


def check_rank(_: int, layout: Layout, world_size: int, cases: Sequence[Case]) -> list[Counts]:
    make = layout.make(world_size)

    def spread(wholes: Wholes) -> dict[str, torch.Tensor | None]:
        return {name: make(i, whole) for i, (name, whole) in enumerate(wholes.items())}

    counts = []
    for case in cases:
        model = Holder(spread(case.start))
        hold = prune.hold_zeros(model, include="*")
        values, gradients = [*map(spread, case.values)], [*map(spread, case.gradients)]
        for move, after in enumerate(case.after):
            for name, parameter in model.named_parameters():
                value = values[move % 3][name]
                assert value is not None
                local(parameter).copy_(trained(local(parameter), local(value)))
                parameter.grad = gradients[move % 3][name]
            by = case.bys[move % len(case.bys)]
            counts.append(hold.regrow(SHARE, case.pattern, by=by, seed=move))
            for name, wanted in spread(after).items():
                if wanted is not None:
                    got, expected = local(model.get_parameter(name)), local(wanted)
                    same = torch.equal(got, expected) and torch.equal(got.signbit(), expected.signbit())
                    assert same, (layout.name, world_size, case.pattern, by, move, name)
            num_held = sum(int(is_held(whole).sum()) for whole in after.values())
            assert (counts[-1].num_held, counts[-1].num_moved) == (num_held, case.moved[move])
        hold.remove()  # of all optimizers there are
    return counts


def check(layout: Layout, world_size: int, cases: Sequence[Case]) -> None:
    all_counts = run_threads(world_size, check_rank, layout, world_size, cases)
    assert all(counts == all_counts[0] for counts in all_counts)
    assert any(of_move.num_moved for of_move in all_counts[0])


@pytest.mark.parametrize(("layout", "world_size", "cases"), over_layouts(PATTERNS, BYS, DTYPES))
@pytest.mark.sampled(10)
def test_equals_the_plain_answer(layout: Layout, world_size: int, cases: list[Combination]) -> None:
    in_rows = prune.PerRow(0.55), "gradient", torch.float64  # rows are cut in most layouts
    check(layout, world_size, [made(pattern, [by], dtype, 2) for pattern, by, dtype in [*cases, in_rows]])


def test_without_a_seed_what_grows_is_drawn() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    regrow = Regrow(stop=10, every=2)
    training = SparseTraining(model, optimizer, schedule=constant(0.5), regrow=regrow, seed=None)
    for _ in range(3):
        optimizer.step()
    assert training.updates[-1].num_moved


@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_what_grew_is_trained_before_the_schedule_rises(by: GrowBy, is_resumed: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    how: dict[str, Any] = {"schedule": cubic(0.75, stop=30), "regrow": Regrow(stop=55, every=10, by=by)}
    training, given = SparseTraining(model, optimizer, **how), torch.randn(80, 8, 64)
    grown = torch.zeros_like(model.weight, dtype=torch.bool)
    for step, x in enumerate(given):
        if is_resumed and step == 15:
            training.remove()
            state, training = training.state_dict(), SparseTraining(model, optimizer, **how)
            training.load_state_dict(state)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        kept = model.weight.detach().view(torch.int32) != 0
        assert bool((kept | ~grown).all()) or (step % 10 == 0 and step < 60), step
        grown = kept & (model.weight == 0) if step % 10 == 0 else grown
    assert prune.sparsity(model) == 0.75


def test_a_schedule_that_is_behind_what_moves() -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = SparseTraining(model, optimizer, schedule=at_once(0.5, step=15), regrow=Regrow(stop=55, every=10))
    for step in range(16):  # nothing is there to move at step 10
        assert prune.sparsity(model) == 0.0, step
        optimizer.step()
    assert training.updates[0].step == 15
    assert prune.sparsity(model) == 0.5


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
        ({"schedule": cubic(0.8, stop=35), "regrow": Regrow(stop=1000, every=10)}, 39, "at 0.7977, .* on to 0.8:"),
        ({"schedule": cubic(0.8, stop=35), "regrow": Regrow(stop=1000, every=10)}, 41, ""),
        ({"schedule": cubic(0.8, stop=35), "regrow": Regrow(stop=35, every=10)}, 36, ""),
        ({"schedule": cubic(0.8, stop=35), "regrow": Regrow(stop=31, every=30)}, 36, ""),
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
