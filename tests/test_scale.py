"""A thousand ranks on one: rounds and bytes of what every rank does, on a fake process group. Ceilings, not times."""

from __future__ import annotations

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune.collectives import Traffic
from distprune.shards import Managed, fsdp2
from distprune.shards.torch_private import FSDPState
from tests.fake_files import PLANS
from tests.fake_ranks import CALLS, STEPS, TRAINING, UPDATES, fake_group, sharded_model
from tests.sampling import only_whole

MOST_ROUNDS = 14
MOST_BYTES, MOST_BYTES_A_PARAMETER = 1 << 20, 16


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


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("num_parameters", [10, only_whole(100)])
def test_training_says_little(name: str, num_parameters: int) -> None:
    """Steps say nothing, and an update what its two choices do."""
    used = {}
    for size in (8, 64, 1024):
        with fake_group(size) as comm:
            call = TRAINING[name](sharded_model(num_parameters, size), comm)
            before = comm.traffic.copy()
            call()
            used[size] = comm.traffic - before
    if name in STEPS:
        assert all(traffic == Traffic() for traffic in used.values())
    elif name not in UPDATES:
        assert used[8] == used[64] == used[1024]
        assert used[8].num_rounds == 3
        assert used[8].num_bytes <= 256 + MOST_BYTES_A_PARAMETER * num_parameters
    else:
        for traffic in used.values():
            assert traffic.num_rounds <= 2 * MOST_ROUNDS
            assert traffic.num_bytes <= MOST_BYTES + MOST_BYTES_A_PARAMETER * num_parameters
        assert used[1024].num_bytes <= 1.5 * used[64].num_bytes + (128 << 10)


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
            assert not comm.answers


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
