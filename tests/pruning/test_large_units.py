"""Blocks whose tables are not held are pruned as those whose are, and take no more memory of a larger shard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.collectives.alone import Alone
from distprune.patterns import large_units, own_units
from distprune.patterns.block import Block
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, Ownership
from distprune.shards.matrix import Matrix
from tests.device_path import as_on_a_device, counted_work
from tests.layouts import LAYOUTS
from tests.pruning.test_patterns import check_rank, made, turned_on_rank
from tests.worlds import run_threads

SHAPE = (2, 8, 12)
RUNS = ((0, 21), (21, 23), (23, 150), (150, 192))  # stretches of 192 weights, within a band and over several


@pytest.fixture(params=[0, 1 << 30], ids=["read", "held"])
def no_tables(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """Within, no tables are held; the keys are, or not."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("_TABLES", -1), ("_FEW", 0), ("_KEYS", request.param)):
            patch.setattr(own_units, name, value)
        patch.setattr(large_units, "_UNITS", 4)
        yield patch


@pytest.mark.usefixtures("no_tables")
@pytest.mark.parametrize("name", ["hsdp", "plain", "shard1", "strided"])
@pytest.mark.sampled(3)
def test_every_layout(name: str) -> None:
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    num_ranks = 4 if 4 in layout.world_sizes else 2
    run_threads(num_ranks, check_rank, layout, num_ranks, [case for case in made() if isinstance(case[0], Block)])
    if name != "hsdp":
        run_threads(3, turned_on_rank, ("plain", "shard1", "strided").index(name))


def matrix_of(turned: bool) -> Matrix:
    return Matrix(12, 8, transposed=True, num_matrices=2) if turned else Matrix(16, 12)


def seed_of(score: str) -> dict[str, Any]:
    return {"seed": 3} if score == "random" else {}


def pruned(values: torch.Tensor, block: int, turned: bool, score: str, *, again: bool = False) -> torch.Tensor:
    """Return what is left of ``values`` (2, 8, 12), two matrices; ``again``: after a half was pruned, of the rest."""
    if again:
        module = nn.Linear(12, 16, bias=False)
        module.weight = nn.Parameter(values.view(16, 12))
        for _ in range(2):
            prune.l1_pattern(module, "weight", Block(block, 0.5))
        return module.weight.detach().view(values.shape)
    shard = LocalShard("w", values.clone(), Geometry.whole(tuple(values.shape)), Ownership(), matrix=matrix_of(turned))
    prune.prune_shards([shard], 0.4, pattern=f"block:{block}", score=score, group=Alone(), **seed_of(score))
    return shard.local


VALUES = {
    "ties": torch.arange(192.0).mul(7).remainder(5).sub(1).view(SHAPE),
    "infinite": torch.arange(192.0)
    .mul(7)
    .remainder(11)
    .sub(1)
    .masked_fill(torch.arange(192) % 50 == 3, torch.inf)
    .view(SHAPE),
}
CASES = [
    (kind, block, turned, score)
    for kind in VALUES
    for block in (1, 2, 4)
    for turned in (False, True)
    for score in ("magnitude", "random")
]
WITH_TABLES = {case: pruned(VALUES[case[0]], *case[1:]) for case in CASES}
AGAIN = [pruned(VALUES["ties"], block, False, "magnitude", again=True) for block in (2, 4)]


@pytest.mark.usefixtures("no_tables")
@pytest.mark.parametrize("on_device", [False, True])
def test_equals_what_tables_give(on_device: bool) -> None:
    with as_on_a_device(32) if on_device else nullcontext():
        for case, wanted in WITH_TABLES.items():
            assert torch.equal(pruned(VALUES[case[0]], *case[1:]), wanted), case
        for block, wanted in zip((2, 4), AGAIN, strict=True):
            assert torch.equal(pruned(VALUES["ties"], block, False, "magnitude", again=True), wanted), block
        nan = VALUES["ties"].where(torch.arange(192).view(SHAPE) % 90 > 0, torch.nan)
        with pytest.raises(ValueError, match=r"'w' \(3\)"):
            pruned(nan, 2, True, "magnitude")


@pytest.mark.usefixtures("no_tables")
@pytest.mark.sampled(1)
def test_stretches_of_the_flattened_weight() -> None:
    """As FSDP1 cuts it: anywhere."""

    def on_rank(rank: int, case: tuple[str, int, bool, str]) -> torch.Tensor:
        kind, block, turned, score = case
        local = VALUES[kind].reshape(-1)[slice(*RUNS[rank])].clone()
        geometry = Geometry((192,), ((RUNS[rank],),))
        shard = LocalShard("w", local, geometry, Ownership(), matrix=matrix_of(turned), original_shape=SHAPE)
        prune.prune_shards([shard], 0.4, pattern=f"block:{block}", score=score, **seed_of(score))
        return local

    for case, wanted in WITH_TABLES.items():
        if case[0] == "ties":
            assert torch.equal(torch.cat(run_threads(4, on_rank, case)), wanted.reshape(-1)), case


@pytest.mark.parametrize("turned", [False, True])
def test_memory_beyond_the_mask_does_not_grow(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_units, "_TABLES", 0)
    monkeypatch.setattr(own_units, "_KEYS", 0)

    def beyond(num_lines: int) -> int:
        values = torch.arange(num_lines * 512.0).sin_().view(num_lines, 512)
        matrix = Matrix(512, num_lines, transposed=True) if turned else Matrix(num_lines, 512)
        shard = LocalShard("w", values, Geometry.whole((num_lines, 512)), Ownership(), matrix=matrix)
        with as_on_a_device(1 << 15), counted_work() as work:
            prune.prune_shards([shard], 0.5, pattern="block:2", group=Alone())
        return work.peak - values.numel()

    num_more = (1024 - 256) * 512 // 4
    assert beyond(1024) - beyond(256) < num_more  # bytes a block: of survivors
