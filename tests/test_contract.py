"""The promise: every method, in every layout, on every awkward shape, gives the oracle's answer with ``==``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune import PruneReport, prune_model
from distprune.patterns.base import Scope
from distprune.patterns.unstructured import Unstructured
from tests.layouts import LAYOUTS, Layout
from tests.oracle import keep_highest, random_scores
from tests.sampling import Combination, over_layouts
from tests.worlds import run_threads

# Even; uneven; fewer rows than ranks; one element; a vector; three dims; empty; one row; a scalar.
SHAPES = ((16, 8), (7, 5), (3, 4), (1, 1), (13,), (5, 2, 3), (0, 4), (1, 9), ())
SCORES = ("magnitude", "random")
SCOPES: tuple[Scope, ...] = ("global", "tensor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SEED = 17
# Values, and the share of zeros to end with.
KINDS = (("normal", 0.5), ("ties", 0.5), ("ties", 0.05), ("same", 0.2), ("infinite", 0.9))


def whole_model(kind: str, dtype: torch.dtype, shapes: Sequence[Sequence[int]] = SHAPES) -> dict[str, torch.Tensor]:
    """Return whole parameters; ``ties`` are small integers with zeros of both signs, ``same`` all equal."""
    generator = torch.Generator().manual_seed(len(kind))
    model: dict[str, torch.Tensor] = {}
    for i, shape in enumerate(shapes):
        values = torch.randn(tuple(shape), generator=generator)
        if kind == "ties":
            values = values.mul(2).round()  # -0.0 among them
        elif kind == "same":
            values = torch.full(tuple(shape), -0.5)
        elif kind == "infinite":
            values = values.masked_fill(values > 0.5, torch.inf).masked_fill(values < -1, -torch.inf)
        model[f"p{i}"] = values.to(dtype)
    return model


def oracle(model: dict[str, torch.Tensor], score: str, scope: str, sparsity: int | float) -> dict[str, torch.Tensor]:
    """Return the pruned whole parameters. Zeros come first."""
    names = list(model)
    groups = [names] if scope == "global" else [[name] for name in names]
    pruned = {}
    for group in groups:
        values = [model[name] for name in group]
        if score == "magnitude":
            scores = [value.abs() for value in values]
        else:
            scores = [random_scores(name, model[name].shape, SEED).where(model[name] != 0, -1) for name in group]
        num_elements = sum(value.numel() for value in values)
        k = sparsity if isinstance(sparsity, int) else round(sparsity * num_elements)
        everything = [torch.ones_like(value, dtype=torch.bool) for value in values]
        for name, value, keep in zip(group, values, keep_highest(scores, everything, k), strict=True):
            pruned[name] = value.masked_fill(~keep, 0)
    return pruned


class Holder(nn.Module):
    """A module whose parameters are the tensors given; ``None`` is left out."""

    def __init__(self, tensors: dict[str, torch.Tensor | None]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor is not None:
                self.register_parameter(name, nn.Parameter(tensor))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def check_rank(
    rank: int,
    layout: Layout,
    world_size: int,
    cases: list[tuple[Any, ...]],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[PruneReport]:
    spread = layout.make(world_size)
    reports = []
    for score, scope, sparsity, model, expected in cases:
        held = Holder({name: spread(i, whole) for i, (name, whole) in enumerate(model.items())})
        pattern = Unstructured(sparsity, scope)
        with around():
            report = prune_model(held, score=score, pattern=pattern, seed=SEED, include="*")
        for i, (name, whole) in enumerate(expected.items()):
            wanted = spread(i, whole)
            if wanted is not None:
                got = local(held.get_parameter(name))
                same = torch.equal(got, local(wanted)) and got.shape == local(wanted).shape
                assert same, f"{layout.name} {world_size=} {rank=} {score} {scope} {sparsity} {name} {whole.dtype}"
        reports.append(report)
    return reports


@pytest.mark.parametrize(("layout", "world_size", "combinations"), over_layouts(SCORES, SCOPES, DTYPES, KINDS))
def test_equals_single_process(layout: Layout, world_size: int, combinations: list[Combination]) -> None:
    cases = []
    for score, scope, dtype, (kind, sparsity) in combinations:
        model = whole_model(kind, dtype)
        cases.append((score, scope, sparsity, model, oracle(model, score, scope, sparsity)))
    reports = run_threads(world_size, check_rank, layout, world_size, cases)
    for case, of_ranks in zip(cases, zip(*reports, strict=True), strict=True):
        _, scope, sparsity, model, expected = case
        for report in of_ranks:  # the counts are exact, and the same on every rank
            assert report.parameters == of_ranks[0].parameters
            zeros = {parameter.name: parameter.num_zeros for parameter in report.parameters}
            assert zeros == {name: int((whole == 0).sum()) for name, whole in expected.items()}
        if scope == "global":
            num_zeros = sum(int((whole == 0).sum()) for whole in model.values())
            num_elements = sum(whole.numel() for whole in model.values())
            assert of_ranks[0].num_zeros == max(round(sparsity * num_elements), num_zeros)


@pytest.mark.parametrize("score", SCORES)
def test_so_many(score: str) -> None:
    model = whole_model("ties", torch.float32, [(7, 5), (3, 4)])
    num_zeros = sum(int((whole == 0).sum()) for whole in model.values())
    numbers = (0, 1, num_zeros, num_zeros + 5, 47)
    cases = [(score, "global", k, model, oracle(model, score, "global", k)) for k in numbers]
    layout = next(layout for layout in LAYOUTS if layout.name == "shard0")
    for reports in run_threads(3, check_rank, layout, 3, cases):
        assert [report.num_zeros for report in reports] == [max(k, num_zeros) for k in numbers]


def test_mixed_dtypes_compete_by_value() -> None:
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    model = {f"p{i}": torch.randn(9, 4).to(dtype) for i, dtype in enumerate(dtypes)}
    cases = [("magnitude", "global", 0.5, model, oracle(model, "magnitude", "global", 0.5))]
    for layout in LAYOUTS:
        if 4 in layout.world_sizes:
            run_threads(4, check_rank, layout, 4, cases)


def test_pruning_again_goes_on_from_the_zeros() -> None:
    model = whole_model("normal", torch.float32, [(8, 6), (5, 5)])
    once = oracle(model, "magnitude", "global", 0.3)
    twice = oracle(once, "random", "global", 0.5)

    def prune_twice(rank: int) -> None:
        layout = next(layout for layout in LAYOUTS if layout.name == "shard1")
        spread = layout.make(3)
        held = Holder({name: spread(i, whole) for i, (name, whole) in enumerate(model.items())})
        prune_model(held, 0.3, include="*")
        assert prune_model(held, 0.3, include="*").num_pruned == 0
        prune_model(held, 0.5, score="random", seed=SEED, include="*")
        for i, (name, whole) in enumerate(twice.items()):
            wanted = spread(i, whole)
            assert wanted is not None
            assert torch.equal(local(held.get_parameter(name)), local(wanted)), (rank, name)

    run_threads(3, prune_twice)
