"""Every public call on the simulated device, plain and under FSDP2, comes to what it comes to on the CPU."""

from __future__ import annotations

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

pytestmark = pytest.mark.xdist_group("device")


def called_on_rank(rank: int, name: str, source: Path, is_sharded: bool) -> tuple[Any, Any, Ran]:
    device, call = on_rank(rank), PUBLIC_CALLS[name]
    expected = results(call(Place(torch.device("cpu"), source)))
    with Costs(DEVICE) as costs:
        found = results(call(Place(device, source, is_sharded)))
    return expected, found, costs.ran


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


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("name", PUBLIC_CALLS)
def test_comes_to_what_the_cpu_comes_to(devices: ProcessPool, split_model: Path, name: str, is_sharded: bool) -> None:
    for expected, found, ran in devices.run(1 + is_sharded, called_on_rank, name, split_model, is_sharded):
        check_alike(expected, found)
        assert ran
        assert not_on_cuda(ran) == {}


def test_every_public_name_is_called() -> None:
    assert CALLED.keys() <= PUBLIC_CALLS.keys()
    assert {name for names in CALLED.values() for name in names} == set(prune.__all__)
