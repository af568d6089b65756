"""Blocks, groups and rows that shard edges cut anywhere, of transposed weights, and with infinite elements."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import distprune as prune
from distprune.collectives.communicator import Alone
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, Ownership
from distprune.shards.matrix import Matrix
from tests.device_path import as_on_a_device
from tests.worlds import run_threads
from tests.wrapped import whole

SHAPE = (2, 8, 12)
RUNS = ((0, 21), (21, 23), (23, 150), (150, 192))  # stretches of 192 weights, within a band and over several
VALUES = {
    "ties": torch.arange(192.0).mul(7).remainder(5).sub(1).view(SHAPE),
    "infinite": torch.arange(192.0)
    .mul(7)
    .remainder(11)
    .sub(1)
    .masked_fill(torch.arange(192) % 50 == 3, torch.inf)
    .view(SHAPE),
}
PATTERNS = (*(prune.Block(size, 0.4) for size in (1, 2, 4)), prune.NByM(2, 4), prune.PerRow(0.4))
CASES = [
    (kind, pattern, turned, score)
    for kind in VALUES
    for pattern in PATTERNS
    for turned in (False, True)
    for score in ("magnitude", "random")
]


def matrix_of(turned: bool) -> Matrix:
    return Matrix(12, 8, transposed=True, num_matrices=2) if turned else Matrix(16, 12)


def pruned(
    values: torch.Tensor, geometry: Geometry, pattern: prune.Pattern, turned: bool, score: str, **group: Any
) -> torch.Tensor:
    """Return what is left of ``values``, a part of two matrices."""
    shard = LocalShard("w", values.clone(), geometry, Ownership(), matrix=matrix_of(turned), original_shape=SHAPE)
    seed: dict[str, Any] = {"seed": 3} if score == "random" else {}
    prune.prune_shards([shard], pattern=pattern, score=score, **seed, **group)
    return shard.local


WHOLE = {case: pruned(VALUES[case[0]], Geometry.whole(SHAPE), *case[1:], group=Alone()) for case in CASES}


def test_transposed_blocks_are_those_of_the_matrix() -> None:
    for case, there in WHOLE.items():
        kind, pattern, turned, score = case
        if turned and (score == "magnitude" or (isinstance(pattern, prune.Block) and pattern.size > 1)):
            values = VALUES[kind].transpose(1, 2).reshape(24, 8)
            shard = LocalShard("w", values.clone(), Geometry.whole((24, 8)), Ownership())
            prune.prune_shards([shard], pattern=pattern, group=Alone(), score=score, seed=3)
            assert torch.equal(shard.local, there.transpose(1, 2).reshape(24, 8)), case


@pytest.mark.parametrize("on_device", [False, True])
def test_stretches_of_the_flattened_weight(on_device: bool) -> None:
    """As FSDP1 cuts it: anywhere."""

    def on_rank(rank: int) -> list[torch.Tensor]:
        geometry = Geometry((192,), ((RUNS[rank],),))
        return [pruned(VALUES[case[0]].reshape(-1)[slice(*RUNS[rank])], geometry, *case[1:]) for case in CASES]

    with as_on_a_device(32) if on_device else nullcontext():
        parts = run_threads(4, on_rank)
    for i, (case, wanted) in enumerate(WHOLE.items()):
        assert torch.equal(torch.cat([of_rank[i] for of_rank in parts]), wanted.reshape(-1)), case


def test_copies_do_not_add_up() -> None:
    """Of columns that cut blocks: each half is held twice."""
    values = torch.ones(4, 12)
    values[:, 4:8] = 0.7  # the block that both halves hold a part of: twice that would be the most

    def on_rank(_: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        weights = nn.ParameterList([distribute_tensor(values, mesh, [Replicate(), Shard(1)], src_data_rank=None)])
        prune.prune_model(weights, pattern=prune.Block(4, 1), include="*")
        assert whole(weights[0])[:, 4:8].eq(0).all()

    run_threads(4, on_rank)


@pytest.mark.parametrize("run", [(0, 4096), (32, 4000), (0, 2080)])
def test_large_blocks_are_summed_as_small_ones(run: tuple[int, int]) -> None:
    """Their sums are those of float64's bits, less an offset for each element."""
    values = torch.arange(4096.0).mul(7).remainder(11).add(1).view(64, 64)

    def on_rank(rank: int) -> torch.Tensor:
        own = ((run,), ((0, run[0]), (run[1], 4096)))[rank]
        local = torch.cat([values.reshape(-1)[slice(*part)] for part in own])
        runs = tuple(part for part in own if part[0] < part[1])
        shard = LocalShard("w", local, Geometry((4096,), (runs,)), Ownership(), original_shape=(64, 64))
        prune.prune_shards([shard], 0.5, pattern="block:32")
        return shard.local

    first, second = run_threads(2, on_rank)
    found = torch.cat([second[: run[0]], first, second[run[0] :]]).view(2, 32, 2, 32)
    sums = values.view(2, 32, 2, 32).sum((1, 3))
    assert torch.equal(found.ne(0).any(3).any(1), sums > sums.view(-1).sort().values[1])
