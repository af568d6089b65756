"""What the functions put on the wire, counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distprune as prune
from distprune.collectives.base import Traffic
from distprune.collectives.communicator import ProcessGroup
from distprune.patterns import channels
from tests.worlds import run_threads

Call = Callable[[list[tuple[nn.Module, str]], ProcessGroup], object]

CALLS: dict[str, Call] = {
    "identity": lambda pairs, comm: prune.identity(*pairs[0], group=comm),
    "custom_from_mask": lambda pairs, comm: prune.custom_from_mask(*pairs[0], torch.ones(64, 48), group=comm),
    "l1_unstructured": lambda pairs, comm: prune.l1_unstructured(*pairs[0], 0.5, group=comm),
    "random_unstructured": lambda pairs, comm: prune.random_unstructured(*pairs[0], 0.5, seed=1, group=comm),
    "ln_structured": lambda pairs, comm: prune.ln_structured(*pairs[0], 0.5, 2, 1, group=comm),
    "ln_structured, inf": lambda pairs, comm: prune.ln_structured(*pairs[0], 0.5, float("inf"), 1, group=comm),
    "random_structured": lambda pairs, comm: prune.random_structured(*pairs[0], 0.5, 0, group=comm),
    "each l1": lambda pairs, comm: prune.prune_each(pairs, prune.L1Unstructured, amount=0.5, group=comm),
    "each ln": lambda pairs, comm: prune.prune_each(pairs, prune.LnStructured, amount=0.5, n=2, dim=0, group=comm),
    "global l1": lambda pairs, comm: prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5, group=comm),
}


def traffic_on_rank(_: int, call: str, num_tensors: int, num_columns: int, again: bool) -> Traffic:
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    for i in range(num_tensors):
        whole = torch.randn(64, num_columns, generator=generator)
        module.register_parameter(f"p{i}", nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)))
    pairs = [(module, f"p{i}") for i in range(num_tensors)]
    if again:
        prune.prune_each(pairs, prune.L1Unstructured, amount=0.1)
    comm = ProcessGroup()
    CALLS[call](pairs, comm)
    return comm.traffic


def traffic(call: str, num_tensors: int = 1, num_columns: int = 48, again: bool = False) -> tuple[int, int]:
    first, second = run_threads(2, traffic_on_rank, call, num_tensors, num_columns, again, draws=True)
    assert first == second
    return first.num_rounds, first.num_bytes


# Rounds; the first and the last of them agree on the arguments and on the outcome.
@pytest.mark.parametrize(
    ("call", "num_rounds"),
    [
        ("identity", 2),
        ("custom_from_mask", 2),  # the second: the masks, which are the same on replicas
        ("l1_unstructured", 5),  # without ties
        ("random_unstructured", 5),  # 6 by other seeds, about as often
        ("ln_structured", 5),  # the grid, the table, and whether all could sort it
        ("ln_structured, inf", 5),
        ("random_structured", 4),
    ],
)
def test_rounds(call: str, num_rounds: int) -> None:
    assert traffic(call)[0] == num_rounds


@pytest.mark.parametrize("call", ["each l1", "each ln", "global l1"])
def test_many_tensors_take_the_rounds_of_one(call: str) -> None:
    one, many = traffic(call, 2), traffic(call, 40)
    assert one[0] <= many[0] <= one[0] + 2 <= 14  # digits are narrower
    if call == "global l1":
        assert many[1] - one[1] == 38 * 24  # the census, and what is reported
    assert many[1] < many[0] << 20


@pytest.mark.parametrize("call", ["l1_unstructured", "global l1", "each l1"])
def test_bytes_do_not_grow_with_the_elements(call: str) -> None:
    small, large = traffic(call, 2, 48), traffic(call, 2, 4800)
    assert small[0] == large[0] <= 10
    assert max(small[1], large[1]) <= small[0] << 20


def test_channels_travel_and_nothing_else_grows() -> None:
    rounds, num_bytes = traffic("ln_structured", 1, 48)
    assert traffic("ln_structured", 1, 480) == (rounds, num_bytes + (480 - 48) * 16)  # along dim 1
    assert traffic("ln_structured", 1, 48, again=True) == (rounds, num_bytes)
    drawn = traffic("random_structured", 1, 48)
    assert traffic("random_structured", 1, 48, again=True) == drawn
    assert traffic("random_structured", 1, 480) == drawn  # along dim 0


def test_a_large_table_travels_in_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, num_bytes = traffic("ln_structured", 1, 48)
    monkeypatch.setattr(channels, "_WORDS", 2 * 20)
    assert traffic("ln_structured", 1, 48) == (rounds + 2, num_bytes + 2 * 8)
