"""What of a tensor is this rank's, and who counts it; wrappers are in the contract."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard
from tests.worlds import run_threads


def test_plain_tensors_leave_the_owner_open() -> None:
    shard = local_shard("w", torch.zeros(2, 3))
    assert shard.ownership is None
    settled = shard.owned_by(2, 1, 3)
    assert (settled.owned, settled.num_replicas) == (False, 3)


def test_partial_sums_are_refused() -> None:
    def check(_: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(NotImplementedError, match="'w' is a partial sum on mesh axis 0"):
            local_shard("w", tensor)

    run_threads(2, check)


def test_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="not a tensor"):
        local_shard("w", 3)  # type: ignore[arg-type]


def test_a_local_tensor_of_another_shape() -> None:
    good = local_shard("w", torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"shape \(3, 2\)"):
        LocalShard("w", torch.zeros(3, 2), good.geometry)


def test_replicas_are_owned_by_the_lowest_rank_of_the_mesh() -> None:
    def owned(_: int) -> bool | None:
        mesh = init_device_mesh("cpu", (3,))
        return local_shard("w", DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)).owned

    assert run_threads(3, owned) == [True, False, False]
