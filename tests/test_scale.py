"""A thousand ranks on one: rounds and bytes of what every rank does, on a fake process group. Ceilings, not times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import distprune as prune
from distprune.collectives.base import Traffic
from distprune.shards import fsdp2
from distprune.shards.fsdp2 import Managed
from distprune.shards.torch_private import FSDPState
from tests.fake_files import PLANS
from tests.fake_ranks import (
    CALLS,
    SOLVERS,
    STEPS,
    TRAINING,
    UPDATES,
    EqualRanks,
    Prepare,
    fake_block,
    fake_group,
    inputs_of,
    prune_block,
    sharded_model,
)
from tests.sampling import only_whole

MOST_ROUNDS = 14
MOST_BYTES, MOST_BYTES_A_PARAMETER = 1 << 20, 16  # of a round; of a call
# Of a one-shot block, a layer and a rank: of an input of 4 features 96 bytes are its sum on the way to its owner, or 64
# those of an expert's tokens; and 64 its sums on the way to all.


def traffic_of(num_parameters: int, prepare: Prepare) -> dict[int, Traffic]:
    """Return what one rank sends, by the number of ranks, in the call that ``prepare`` returns."""
    used = {}
    for size in (8, 64, 1024):
        with fake_group(size) as comm:
            call = prepare(sharded_model(num_parameters, size), comm)
            before = comm.traffic.copy()
            call()
            used[size] = comm.traffic - before
    return used


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("num_parameters", [100, only_whole(1000), only_whole(5000)])
def test_messages_stay_small(call: str, num_parameters: int) -> None:
    num_parameters = min(num_parameters, 100) if call == "channels" else num_parameters
    used = traffic_of(num_parameters, lambda model, comm: partial(CALLS[call], model, comm))
    for size, traffic in used.items():
        table = 16 * 8 * size * num_parameters if call == "channels" else 0  # in rounds of a MiB
        assert traffic.num_rounds <= MOST_ROUNDS + (table >> 20)
        assert traffic.num_bytes <= MOST_BYTES * traffic.num_rounds + MOST_BYTES_A_PARAMETER * num_parameters
    if call == "channels":
        return
    # With more ranks there are more elements, and positions have more digits.
    assert used[1024].num_bytes <= 1.5 * used[64].num_bytes + (1 << 20)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("num_parameters", [10, only_whole(100), only_whole(1000), only_whole(5000)])
def test_training_says_little(name: str, num_parameters: int) -> None:
    """Steps say nothing, and an update what its two choices do."""
    used = traffic_of(num_parameters, TRAINING[name])
    if name in STEPS:
        assert all(traffic == Traffic() for traffic in used.values())
    elif name not in UPDATES:
        assert used[8] == used[64] == used[1024]
        assert used[8].num_rounds == 4  # some matrices are mostly zeros
        assert used[8].num_bytes <= 256 + (8 + 16) * num_parameters
    else:
        for traffic in used.values():
            assert traffic.num_rounds <= 2 * MOST_ROUNDS
            assert traffic.num_bytes <= MOST_BYTES * traffic.num_rounds + 2 * MOST_BYTES_A_PARAMETER * num_parameters
        assert used[1024].num_bytes <= 1.5 * used[64].num_bytes + (2 << 20)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("num_parameters", [100, only_whole(1000), only_whole(5000)])
def test_plans_stay_small(plan: str, num_parameters: int) -> None:
    """To know what to read is a few rounds, 16 bytes a parameter, and one slice or piece of each, at any size."""
    for size in (8, 64, 1024):
        with fake_group(size) as comm:
            num_pieces = PLANS[plan](sharded_model(num_parameters, size), comm)
            assert num_pieces == num_parameters
            assert comm.traffic.num_rounds <= 9
            assert comm.traffic.num_bytes <= 1024 + 16 * num_parameters


def test_parameters_of_fsdp2_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by every call that is about one of them."""
    looks: list[FSDPState | None] = []
    managed_by = fsdp2._managed_by

    def counted(state: FSDPState) -> list[Managed]:
        looks.append(state)
        return managed_by(state)

    with fake_group(8):
        layers = [nn.Linear(8, 8, bias=False) for _ in range(5)]
        for layer in layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (8,)))
        monkeypatch.setattr(fsdp2, "_managed_by", counted)
        for layer in layers:
            prune.identity(layer, "weight")
        num_to_prune = looks.count(fsdp2.state_of(layers[0]))
        for layer in layers:
            prune.remove(layer, "weight")
        assert (num_to_prune, looks.count(fsdp2.state_of(layers[0]))) == (1, 1)


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
    """No rank hears of what concerns others alone."""
    num_layers = 4 + 2 * num_experts if num_experts else 7
    costs = {}
    for size in (8, 64, 1024):
        with fake_group(size) as comm:
            costs[size] = block_costs(comm, num_experts, how)
            assert comm.num_objects == 0
        _, num_rounds, num_bytes = costs[size]
        assert num_rounds <= 12
        assert num_bytes <= 8 * 1024 + 176 * num_layers  # 16 features of 8 bytes, and what is agreed on
    assert costs[1024][0] <= 1.25 * costs[64][0] + 16 * 1024  # owners are looked for among all ranks


def test_cut_rows_take_as_many_rounds_on_any_number_of_ranks() -> None:
    num_rounds = set()
    for size in (8, 64, 1024):
        with fake_group(size) as comm:
            CALLS["rows"](sharded_model(1, size, (2048, 1), Shard(1)), comm)
            num_rounds.add(comm.traffic.num_rounds)
            # A rank's part of each row is a run of one key, padded to 8 bytes for each of the homes.
            assert comm.largest <= 2048 * (4 + 16) + (8 + 24 + 4) * size
    assert num_rounds == {3 + 3}
