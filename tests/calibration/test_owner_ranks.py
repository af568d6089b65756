"""Owners share the work out, and no rank gets more than it can bear."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distprune.calibration.owner_ranks import OwnerRank, find_owners

SMOLLM2 = [(576, 960), (576, 576), (576, 3072), (1536, 576)]  # features, rows of all layers
LLAMA_7B = [(4096, 12288), (4096, 4096), (4096, 22016), (11008, 4096)]
MIXTURE = [(64, 96), (64, 64)] + [(64, 256)] * 32 + [(128, 64)] * 32
BLOCKS = {"smollm2": SMOLLM2, "llama 7b": LLAMA_7B, "mixture": MIXTURE, "alike": [(64, 64)] * 8, "one": [(8, 8)]}


def work(shapes: list[tuple[int, int]], owners: Sequence[OwnerRank], num_ranks: int) -> list[float]:
    """Multiplications of every rank."""
    loads = [0.0] * num_ranks
    for (num_in, num_out), owner in zip(shapes, owners, strict=True):
        loads[owner.rank] += num_in**3 / 4
        for rank in range(num_ranks):
            loads[rank] += num_out * num_in**2 * (1 / num_ranks if owner.spread else rank == owner.rank)
    return loads


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 64, 1000])
@pytest.mark.parametrize("shapes", BLOCKS.values(), ids=BLOCKS)
def test_work_is_shared_out(shapes: list[tuple[int, int]], num_ranks: int) -> None:
    owners = find_owners(tuple(shapes), num_ranks)
    assert all(0 <= owner.rank < num_ranks for owner in owners)
    all_spread = [OwnerRank(owner.rank, spread=True) for owner in owners]
    busiest = max(work(shapes, owners, num_ranks))
    factor = max(num_in**3 for num_in, _ in shapes) / 4  # one rank's work, however many there are
    assert busiest <= 1.25 * max(max(work(shapes, all_spread, num_ranks)), factor)
    for rank in range(num_ranks):
        swept = [a * b for (a, b), owner in zip(shapes, owners, strict=True) if owner == OwnerRank(rank)]
        assert sum(swept) * num_ranks <= 2 * sum(a * b for a, b in shapes)


def test_known_blocks() -> None:
    """On two ranks no input of a Llama is spread: its last layer, whose input is the widest, against all others."""
    for shapes in (SMOLLM2, LLAMA_7B):
        assert list(find_owners(tuple(shapes), 1)) == [OwnerRank(0)] * 4
        assert list(find_owners(tuple(shapes), 2)) == [OwnerRank(1), OwnerRank(1), OwnerRank(1), OwnerRank(0)]
        assert all(owner.spread for owner in find_owners(tuple(shapes), 64))
    owners = find_owners(tuple(MIXTURE), 8)
    assert not any(owner.spread for owner in owners)
    loads = work(MIXTURE, owners, 8)
    assert max(loads) <= 1.1 * min(loads)
    assert find_owners((), 2) == ()
