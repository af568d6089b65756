"""Patterns within rows are those of a plain Python loop, ties and all."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from distprune.selection.highest import keep_highest_per_group, keep_highest_per_row

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)
SHAPES = [(1, 4), (3, 8), (5, 16), (70, 2048), (0, 8), (3, 0)]  # 64 rows of 2048 are one chunk


def by_loop(scores: torch.Tensor, num_pruned: int, group_size: int) -> torch.Tensor:
    keep = torch.ones(scores.shape, dtype=torch.bool)
    for r, row in enumerate(scores.tolist()):
        for start in range(0, len(row), max(group_size, 1)):
            order = sorted((value, start + i) for i, value in enumerate(row[start : start + group_size]))
            for _, i in order[:num_pruned]:
                keep[r, i] = False
    return keep


def tied_scores(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Few distinct values, both zeros among them."""
    values = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values * torch.tensor(-1, dtype=dtype) if dtype.is_floating_point else values


@functools.cache
def by_kind(shape: tuple[int, int], num_pruned: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the plain answers for the integers, and for the floats: their values are the same in every dtype."""
    integers, floats = (by_loop(tied_scores(shape, of), num_pruned, group_size) for of in (torch.int32, torch.float32))
    return integers, floats


GROUPS = ((2, 4), (1, 4), (1, 2), (0, 4), (4, 4), (1, 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(6)
def test_groups(shape: tuple[int, int]) -> None:
    for n, m in GROUPS[: 2 if shape[0] > 64 else None]:  # the plain loop takes long
        wanted = by_kind(shape, m - n, m)
        for dtype in DTYPES:
            keep = keep_highest_per_group(tied_scores(shape, dtype), n, m)
            assert torch.equal(keep, wanted[dtype.is_floating_point]), (dtype, n, m)


@pytest.mark.parametrize(("n", "m"), [(4, 8), (5, 16), (1, 8), (3, 32), (17, 64)])
def test_large_groups(n: int, m: int) -> None:
    for scores in (tied_scores((7, 128), torch.float32), torch.randn(7, 128)):
        assert torch.equal(keep_highest_per_group(scores, n, m), by_loop(scores, m - n, m))


@pytest.mark.sampled(1)
def test_a_row_longer_than_a_chunk() -> None:
    scores = tied_scores((2, (1 << 17) + 4), torch.float32)
    assert torch.equal(keep_highest_per_group(scores, 2, 4), by_loop(scores, 2, 4))
    assert torch.equal(keep_highest_per_row(scores, 30_000), by_loop(scores, 30_000, scores.shape[1]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(6)
def test_rows(shape: tuple[int, int]) -> None:
    num_columns = shape[1]
    for num_pruned in {num_columns // 2} if shape[0] > 64 else {0, min(1, num_columns), num_columns // 2, num_columns}:
        wanted = by_kind(shape, num_pruned, num_columns)
        for dtype in DTYPES:
            keep = keep_highest_per_row(tied_scores(shape, dtype), num_pruned)
            assert torch.equal(keep, wanted[dtype.is_floating_point]), (dtype, num_pruned)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, torch.inf, -torch.inf]), min_size=1, max_size=24),
    num_pruned=st.integers(0, 24),
)
def test_any_row(values: list[float], num_pruned: int) -> None:
    scores = torch.tensor([values, values[::-1]])
    num_pruned = min(num_pruned, len(values))
    wanted = by_loop(scores, num_pruned, len(values))
    assert torch.equal(keep_highest_per_row(scores, num_pruned), wanted)
    assert torch.equal(keep_highest_per_group(scores, len(values) - num_pruned, len(values)), wanted)
    assert torch.equal(keep_highest_per_row(scores, torch.tensor([num_pruned, 0]))[0], wanted[0])


def test_strided_scores() -> None:
    scores = torch.randn(8, 12).t()
    assert torch.equal(keep_highest_per_group(scores, 2, 4), by_loop(scores, 2, 4))
    assert torch.equal(keep_highest_per_row(scores, 3), by_loop(scores, 3, 8))


def test_bad_input() -> None:
    scores = torch.ones(2, 6)
    with pytest.raises(ValueError, match=r"2:4 needs a number of columns that 4 divides, not 6"):
        keep_highest_per_group(scores, 2, 4)
    for n, m in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="is not a pattern"):
            keep_highest_per_group(scores, n, m)
    with pytest.raises(ValueError, match="num_pruned=7 is not between 0 and the 6 columns"):
        keep_highest_per_row(scores, 7)
    with pytest.raises(ValueError, match="must be 2-D"):
        keep_highest_per_row(torch.ones(3), 1)
    scores[1, 2] = torch.nan
    for num_kept in (0, 1, 2):
        with pytest.raises(ValueError, match="1 scores are NaN"):
            keep_highest_per_group(scores, num_kept, 2)
        with pytest.raises(ValueError, match="1 scores are NaN"):
            keep_highest_per_row(scores, num_kept)


def test_a_number_for_each_row() -> None:
    torch.manual_seed(0)
    scores = torch.randint(4, (6, 9))
    counts = torch.tensor([0, 3, 9, 3, 1, 0])
    keep = keep_highest_per_row(scores, counts)
    for row, count in enumerate(counts.tolist()):
        assert torch.equal(keep[row : row + 1], keep_highest_per_row(scores[row : row + 1], count))
    assert torch.equal(keep_highest_per_row(scores, torch.full((6,), 2)), keep_highest_per_row(scores, 2))
