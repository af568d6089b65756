"""One-shot pruning is the papers' on one rank, and the same on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distprune import Block, NByM, PerRow, Unstructured
from distprune.calibration import OneShotMethod, OneShotReport, prune_blocks
from distprune.calibration.rows import Rows
from distprune.calibration.statistics import Moments
from distprune.calibration.wanda import prune_by_scores
from distprune.collectives import Alone
from distprune.selection import Pattern
from distprune.shards import decoder_blocks
from tests import oneshot_oracle as oracle
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.pattern_oracle import keep_in_pattern
from tests.worlds import ProcessPool

TOKENS = samples(5)
PATTERNS: dict[Pattern, oracle.Pattern] = {
    Unstructured(0.5): 0.5,
    NByM(2, 4): oracle.NM(2, 4),
    NByM(4, 8): oracle.NM(4, 8),
}
HALF, BLOCKS = Unstructured(0.5), Block(4, 0.4)


def matrices(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every linear map of the blocks as (out, in)."""
    return {
        f"{block_name}.{name}": linear.weight
        for block_name, block in decoder_blocks(model)
        for name, linear in oracle.linears(block).items()
    }


def share_alike(model: nn.Module, masks: dict[str, torch.Tensor]) -> float:
    found = matrices(model)
    assert found.keys() == masks.keys()
    alike = sum(int(((found[name] != 0) == keep).sum()) for name, keep in masks.items())
    return alike / sum(keep.numel() for keep in masks.values())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
def test_wanda_is_the_papers(architecture: str, pattern: Pattern) -> None:
    model, plain = tiny_model(architecture), tiny_model(architecture)
    masks = oracle.prune_model(plain, TOKENS, "wanda", PATTERNS[pattern])
    report = prune_blocks(model, TOKENS, method="wanda", pattern=pattern)
    assert share_alike(model, masks) == 1.0
    for name, weight in matrices(model).items():
        assert torch.equal(weight, matrices(plain)[name])
    check_counts(model, report, "wanda", pattern)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
def test_sparsegpt_is_the_papers(architecture: str, pattern: Pattern) -> None:
    model, plain = tiny_model(architecture), tiny_model(architecture)
    masks = oracle.prune_model(plain, TOKENS, "sparsegpt", PATTERNS[pattern])
    report = prune_blocks(model, TOKENS, method="sparsegpt", pattern=pattern)
    assert share_alike(model, masks) >= 0.999
    wanted = matrices(plain)
    for name, weight in matrices(model).items():
        assert float((weight - wanted[name]).norm() / wanted[name].norm()) < 0.02
    check_counts(model, report, "sparsegpt", pattern)


def check_counts(model: nn.Module, report: OneShotReport, method: OneShotMethod, pattern: Pattern) -> None:
    """To the element: per matrix, per row, per group, per block of columns."""
    found = matrices(model)
    maps = {of_map.name: of_map for block in report.blocks for of_map in block.maps}
    assert found.keys() == maps.keys()
    for name, weight in found.items():
        zeros = weight == 0
        num_in = weight.shape[1]
        of_map = maps[name]
        assert of_map.num_elements == weight.numel()
        assert of_map.num_zeros == int(zeros.sum())
        if of_map.num_zeros != of_map.num_pruned:
            continue  # dead inputs: zero without being pruned
        if isinstance(pattern, NByM):
            assert (zeros.reshape(-1, pattern.m).sum(1) == pattern.m - pattern.n).all()
        elif isinstance(pattern, Block):
            size = pattern.size
            of_block = zeros.reshape(len(zeros) // size, size, num_in // size, size).sum((1, 3))  # zeros of every block
            num_gone = int((of_block == size * size).sum())
            assert num_gone == round(pattern.amount * of_block.numel())
            assert num_gone * size * size == of_map.num_pruned
        elif isinstance(pattern, PerRow) or method == "wanda":
            assert (zeros.sum(1) == round(pattern.amount * num_in)).all()
        elif method == "sparsegpt":
            for columns in torch.split(zeros, 128, dim=1):
                assert int(columns.sum()) == round(pattern.amount * columns.numel())
        else:
            assert of_map.num_pruned == round(pattern.amount * weight.numel())


def test_blocks_by_the_sums_of_wandas_scores() -> None:
    torch.manual_seed(0)
    weight, sums = torch.randn(8, 12), torch.rand(12) * 5
    rows = Rows(weight.clone(), ((0, 8),), 8, True)
    moments = [Moments(("m",), 3, sums)]
    outcomes = prune_by_scores(Alone(), "block", {"m": rows}, moments, "wanda", Block(2, 0.5), 0)
    scores = weight.abs() * sums.sqrt()
    keep = keep_in_pattern(Block(2, 0.5), ["m"], [scores], [torch.ones_like(weight, dtype=torch.bool)])[0]
    assert torch.equal(rows.weight, weight.masked_fill(~keep, 0))
    assert outcomes["m"].num_pruned == 48


def sharded(model: nn.Module, mesh_shape: tuple[int, ...] | None = None) -> nn.Module:
    shape = mesh_shape or (torch.distributed.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for _, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def on_rank(
    _: int, architecture: str, cases: list[tuple[OneShotMethod, Pattern]], mesh_shape: tuple[int, ...] | None
) -> list[tuple[dict[str, torch.Tensor], OneShotReport]]:
    found = []
    for method, pattern in cases:
        model = sharded(tiny_model(architecture), mesh_shape)
        report = prune_blocks(model, TOKENS, method=method, pattern=pattern, seed=3)
        weights = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for name, p in model.named_parameters()
        }
        found.append((weights, report))
    return found


CASES: list[tuple[OneShotMethod, Pattern]] = [
    ("wanda", HALF),
    ("wanda", NByM(2, 4)),
    ("sparsegpt", HALF),
    ("sparsegpt", NByM(2, 4)),
    ("sparsegpt", PerRow(0.3)),
    ("magnitude", HALF),
    ("magnitude", PerRow(0.3)),
    ("random", HALF),
    ("random", NByM(4, 8)),
    ("wanda", BLOCKS),
    ("magnitude", BLOCKS),
    ("random", BLOCKS),
]


FEW: list[tuple[OneShotMethod, Pattern]] = [("wanda", HALF), ("sparsegpt", HALF)]


@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_do_what_one_does(pool: ProcessPool, world_size: int, architecture: str) -> None:
    cases = CASES if architecture in ("llama", "gpt2", "mixtral") and world_size == 2 else FEW
    check_ranks(pool.run(world_size, on_rank, architecture, cases, None), architecture, cases)


def test_hybrid_sharding(pool: ProcessPool) -> None:
    for architecture in ("gpt2", "mixtral"):
        check_ranks(pool.run(4, on_rank, architecture, FEW, (2, 2)), architecture, FEW)


def check_ranks(
    everywhere: list[list[tuple[dict[str, torch.Tensor], OneShotReport]]],
    architecture: str,
    cases: list[tuple[OneShotMethod, Pattern]],
) -> None:
    for case, (method, pattern) in enumerate(cases):
        alone = tiny_model(architecture)
        report = prune_blocks(alone, TOKENS, method=method, pattern=pattern, seed=3)
        check_counts(alone, report, method, pattern)
        weights, of_ranks = everywhere[0][case]
        together: Any = tiny_model(architecture)
        together.load_state_dict(weights, strict=False)
        check_counts(together, of_ranks, method, pattern)
        kept = {name: weight != 0 for name, weight in matrices(alone).items()}
        assert share_alike(together, kept) >= (0.999 if method == "sparsegpt" else 1.0)
        for of_rank in everywhere[1:]:
            assert [block.maps for block in of_rank[case][1].blocks] == [block.maps for block in of_ranks.blocks]
        for block, wanted in zip(of_ranks.blocks, report.blocks, strict=True):
            for of_map, one in zip(block.maps, wanted.maps, strict=True):
                assert (of_map.name, of_map.num_tokens, of_map.damping) == (one.name, one.num_tokens, one.damping)
                assert of_map.relative_error == pytest.approx(one.relative_error, rel=0.02)
