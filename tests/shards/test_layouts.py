"""Shards of real wrappers hold the elements their geometry says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard
from tests.worlds import ProcessPool, run_threads


def numbered() -> nn.Module:
    """A model whose every element says where it is."""
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5), nn.Linear(5, 3, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    return model


def shards_of(model: nn.Module) -> list[tuple[str, list[int], bool, int]]:
    """Name, flat indices, owned, replicas of every parameter, the values compared with the indices."""
    found = []
    for name, parameter in model.named_parameters():
        shard = local_shard(name, parameter).owned_by(dist.get_rank(), 0, dist.get_world_size())
        flat = shard.geometry.flat_indices(0, shard.geometry.local_numel)
        assert shard.local.flatten().tolist() == flat.tolist(), name
        found.append((name, flat.tolist(), shard.owned, shard.num_replicas))
    return found


def sharded(_: int, layout: str) -> list[tuple[str, list[int], bool, int]]:
    model = numbered()
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    elif layout == "fsdp-dim1":
        fully_shard(
            model,
            mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
            shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 3 == 0 else None,
        )
    else:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
        if layout == "hsdp":
            fully_shard(model, mesh=mesh)
        else:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            if layout == "fsdp-tp":
                parallelize_module(model, mesh["inner"], plan)
                for layer in (model[0], model[2], model[3]):  # type: ignore[index]
                    fully_shard(layer, mesh=mesh["outer"])
                fully_shard(model, mesh=mesh["outer"])
    return shards_of(model)


@pytest.mark.parametrize(
    ("layout", "world_size", "num_replicas"),
    [("fsdp", 2, 1), ("fsdp", 4, 1), ("fsdp-dim1", 3, 1), ("hsdp", 4, 2), ("fsdp-tp", 4, None)],
)
def test_real_wrappers(pool: ProcessPool, layout: str, world_size: int, num_replicas: int | None) -> None:
    by_rank = pool.run(world_size, sharded, layout)
    for i, (name, parameter) in enumerate(numbered().named_parameters()):
        owned = Counter(index for shards in by_rank for index in (shards[i][1] if shards[i][2] else ()))
        assert owned == Counter(range(parameter.numel())), name
        if num_replicas is not None:
            assert {shards[i][3] for shards in by_rank} == {num_replicas}


def test_plain_tensors_leave_the_owner_open() -> None:
    shard = local_shard("w", torch.zeros(2, 3))
    assert shard.ownership is None
    settled = shard.owned_by(2, 1, 3)
    assert (settled.owned, settled.num_replicas) == (False, 3)


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    def check(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        first = mesh["dp"] if rank < 2 else None
        if first is not None:
            tensor = DTensor.from_local(torch.ones(2, 3), first, [Shard(0)], run_check=False)
            assert local_shard("w", tensor).geometry.local_shape == (2, 3)

    run_threads(4, check)


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
