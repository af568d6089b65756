"""Owners take turns, by the size of what they factor, and are chosen among those that hold an expert."""

from __future__ import annotations

import pytest

from distprune.calibration.owner_ranks import share_out

SMOLLM2 = [576**3, 576**3, 576**3, 1536**3]
MIXTURE = [64**3] * 34 + [128**3] * 32


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("sizes", [SMOLLM2, MIXTURE, [8] * 8, [1], []], ids=len)
def test_work_is_shared_out(sizes: list[int], num_ranks: int) -> None:
    loads = [0] * num_ranks
    for size, rank in zip(sizes, share_out(sizes, num_ranks), strict=True):
        loads[rank] += size
    assert max(loads) <= max([sum(sizes) / num_ranks + max(sizes, default=0), 0])
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_widest_input_has_a_rank_of_its_own() -> None:
    assert share_out(SMOLLM2, 2) == [1, 1, 1, 0]


def test_owners_have_the_rows_or_the_least_to_do() -> None:
    assert share_out([10, 20, 30, 40], 3, [[2], [0, 2], [], [2]]) == [2, 0, 0, 2]
