"""The promise on drawn cases: any shapes, mesh, placements, sparsity and number of equal values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from distprune import prune_model
from distprune.patterns.base import Scope
from tests.test_contract import SEED, oracle
from tests.worlds import run_threads

MESHES = [(1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (4, 2), (2, 2, 2)]


@dataclass(frozen=True)
class Case:
    mesh_shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    placements: tuple[tuple[int, ...], ...]  # for every parameter and mesh axis: the dim, -1 replicates
    dtypes: tuple[torch.dtype, ...]
    num_values: int  # how many different values there are
    score: str
    scope: Scope
    sparsity: float
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mesh_shape = draw(st.sampled_from(MESHES))
    shapes, placements = [], []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
        shapes.append(shape)
        placements.append(tuple(draw(st.integers(-1, len(shape) - 1)) for _ in mesh_shape))
    dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    return Case(
        mesh_shape,
        tuple(shapes),
        tuple(placements),
        tuple(draw(dtype) for _ in shapes),
        draw(st.sampled_from([1, 2, 5, 1000])),
        draw(st.sampled_from(("magnitude", "random"))),
        draw(st.sampled_from(("global", "tensor"))),
        draw(st.floats(0, 1)),
        draw(st.integers(0, 1000)),
    )


def check_on_rank(_: int, case: Case, model: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", case.mesh_shape)

    def spread(whole: torch.Tensor, dims: tuple[int, ...]) -> DTensor:
        placements: list[Placement] = [Shard(dim) if dim >= 0 else Replicate() for dim in dims]
        return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)

    held = nn.ParameterDict(
        {
            name: nn.Parameter(spread(whole, dims))
            for (name, whole), dims in zip(model.items(), case.placements, strict=True)
        }
    )
    prune_model(held, case.sparsity, score=case.score, scope=case.scope, seed=SEED, include="*")
    for (name, whole), dims in zip(expected.items(), case.placements, strict=True):
        got = held[name]
        assert isinstance(got, DTensor)
        assert torch.equal(got.to_local(), spread(whole, dims).to_local()), name


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(cases())
def test_any_case_equals_single_process(case: Case) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    model = {}
    for i, (shape, dtype) in enumerate(zip(case.shapes, case.dtypes, strict=True)):
        values = torch.randint(-case.num_values, case.num_values + 1, shape, generator=generator) / 8
        model[f"p{i}"] = values.to(dtype)
    expected = oracle(model, case.score, case.scope, case.sparsity)
    run_threads(math.prod(case.mesh_shape), check_on_rank, case, model, expected)
