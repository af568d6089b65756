"""Every public call on the simulated device, plain and under FSDP2, comes to what it comes to on the CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import distprune as prune
from tests.device.accelerator import DEVICE, on_rank
from tests.device.counter import Costs, Ran
from tests.device.cuda_table import not_on_cuda
from tests.device.public_calls import CALLED, PUBLIC_CALLS, Place, results
from tests.worlds import ProcessPool

# Rows that take about a second each, and are like others: by default under FSDP2 alone.
SECONDS = (
    "rises",
    "movement",
    "rigl",
    "blocks wanda 2:4",
    "blocks magnitude row",
    "blocks random block:4",
    "shrunk groups",
)


@functools.cache
def on_the_cpu(name: str, source: Path) -> Any:
    return results(PUBLIC_CALLS[name](Place(torch.device("cpu"), source)))


def called_on_rank(rank: int, name: str, source: Path, is_sharded: bool) -> tuple[Any, Any, Ran]:
    """Return what the CPU came to, from the first rank, what the device came to, and which operations ran there."""
    place = Place(on_rank(rank), source, is_sharded)
    with Costs(DEVICE) as costs:
        found = results(PUBLIC_CALLS[name](place))
    return on_the_cpu(name, source) if rank == 0 else None, found, costs.ran


def check_alike(one: Any, other: Any) -> None:
    """Masks and choices are the same. Kernels that add in another order move what a model computes by its rounding."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            check_alike(value, other[name])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one == 0, other == 0)
        # A mask of torch's kind has its parameter's dtype on plain modules.
        assert torch.allclose(one, other.to(one.dtype), rtol=1e-5, atol=1e-5, equal_nan=True)
    else:
        assert one == other


ROWS = [
    pytest.param(
        name,
        is_sharded,
        id=f"{name}-{'fsdp2' if is_sharded else 'plain'}",
        marks=pytest.mark.whole if name in SECONDS and not is_sharded else (),
    )
    for name in PUBLIC_CALLS
    for is_sharded in (False, True)
]


@pytest.mark.parametrize(("name", "is_sharded"), ROWS)
@pytest.mark.sampled(74)
def test_comes_to_what_the_cpu_comes_to(devices: ProcessPool, split_model: Path, name: str, is_sharded: bool) -> None:
    of_ranks = devices.run(1 + is_sharded, called_on_rank, name, split_model, is_sharded)
    expected = of_ranks[0][0]
    for _, found, ran in of_ranks:
        check_alike(expected, found)
        assert ran
        assert not_on_cuda(ran) == {}


LOCAL = {"__version__", "calibration_windows"}  # no device is needed for


def test_every_public_name_is_called() -> None:
    assert PUBLIC_CALLS.keys() >= set(SECONDS)
    assert CALLED.keys() <= PUBLIC_CALLS.keys()
    assert {name for names in CALLED.values() for name in names} == set(prune.__all__) - LOCAL
