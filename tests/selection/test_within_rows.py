"""Patterns within rows are those of a plain Python loop, ties and all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from distprune.selection.highest import keep_highest_per_group, keep_highest_per_row
from distprune.shards import device

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(70, 8), (3, 24), (2, 40), (0, 8), (3, 0)], ids=str)
def test_chunks_of_rows(shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several rows, and rows that are longer than a chunk."""
    monkeypatch.setattr(device, "_HOST_CHUNK", 32)
    scores, num_columns = tied_scores(shape, dtype), shape[1]
    whole = num_columns // 3, max(num_columns, 1)  # of 24 and more, which are sorted
    for n, m in ((2, 4), (1, 4), (1, 2), (0, 4), (4, 4), (1, 1), (5, 8), whole):
        assert torch.equal(keep_highest_per_group(scores, n, m), by_loop(scores, m - n, m)), (n, m)
    for num_pruned in {0, min(1, num_columns), num_columns // 2, num_columns}:
        wanted = by_loop(scores, num_pruned, num_columns)
        assert torch.equal(keep_highest_per_row(scores, num_pruned), wanted), num_pruned


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-30, torch.inf, -torch.inf]), min_size=1, max_size=24),
    num_pruned=st.integers(0, 24),
)
def test_any_row(values: list[float], num_pruned: int) -> None:
    scores = torch.tensor([values, values[::-1]]).t().contiguous().t()  # strided
    num_pruned = min(num_pruned, len(values))
    wanted = by_loop(scores, num_pruned, len(values))
    assert torch.equal(keep_highest_per_row(scores, num_pruned), wanted)
    assert torch.equal(keep_highest_per_group(scores, len(values) - num_pruned, len(values)), wanted)
    assert torch.equal(keep_highest_per_row(scores, torch.tensor([num_pruned, 0]))[0], wanted[0])


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
