"""A thousand ranks on one: rounds and bytes of what every rank does, on a fake process group. Ceilings, not times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from distprune.oneshot import moved_rows
from tests.fake_ranks import CALLS, SOLVERS, EqualRanks, fake_block, fake_group, inputs_of, prune_block, sharded_model
from tests.sampling import only_whole

MOST_ROUNDS = 14
MOST_BYTES, MOST_BYTES_A_PARAMETER = 1 << 20, 16
# Of a one-shot block, a layer and a rank: 96 bytes of the sum of an input of 4 features go from each rank to its owner.
# Or 1,056 go everywhere.
MOST_BYTES_OF_BLOCK = {"owners": (300, 150), "in place": (1200, 0)}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("num_parameters", [100, only_whole(1000), only_whole(5000)])
def test_messages_stay_small(call: str, num_parameters: int) -> None:
    used = {}
    for size in (8, 64, 1024):
        with fake_group(size) as comm:
            model = sharded_model(num_parameters, size)
            CALLS[call](model, comm)
            used[size] = comm.traffic
    for traffic in used.values():
        assert traffic.num_rounds <= MOST_ROUNDS
        assert traffic.num_bytes <= MOST_BYTES + MOST_BYTES_A_PARAMETER * num_parameters
    # With more ranks there are more elements, so that fewer counts share a word; or they are worth a sample.
    assert used[1024].num_bytes <= 1.5 * used[64].num_bytes + (128 << 10)


def num_calls(call: Callable[[], object]) -> int:
    """Return how many functions ``call`` calls: its Python, whatever else runs on the machine."""
    num = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return num


def block_costs(comm: EqualRanks, num_experts: int, how: str) -> tuple[int, int, int]:
    """Return calls, rounds and bytes of one block."""
    statistics = inputs_of(comm, fake_block(comm.size, num_experts), SOLVERS[how])
    before = comm.traffic.copy()
    calls = num_calls(lambda: prune_block(comm, statistics, SOLVERS[how]))
    used = comm.traffic - before
    return calls, used.num_rounds, used.num_bytes


@pytest.mark.parametrize("how", SOLVERS)
@pytest.mark.parametrize("num_experts", [0, 32, only_whole(256)])
def test_a_one_shot_block_of_a_thousand_ranks(num_experts: int, how: str) -> None:
    """No rank works on, or hears of, what concerns others alone; behind the first block it is known who holds what."""
    a_layer, a_rank = MOST_BYTES_OF_BLOCK[how]
    num_layers = 4 + 2 * num_experts if num_experts else 7
    moved_rows._plans.clear()
    later = {}
    for size in (8, 64, 1024):
        with fake_group(size) as comm:
            first, later[size] = (block_costs(comm, num_experts, how) for _ in range(2))
            assert comm.num_objects == 0
        for (_, num_rounds, num_bytes), most_rounds in ((first, 13), (later[size], 9)):
            assert num_rounds <= most_rounds
            assert num_bytes <= a_layer * num_layers + a_rank * size
    assert later[1024][0] <= 1.25 * later[64][0] + 8 * 1024  # a few for each rank that sends a part of a sum
