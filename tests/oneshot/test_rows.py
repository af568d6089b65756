"""Whole rows in every layout, and back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from distprune.collectives.communicator import communicator
from distprune.collectives.tensors import broadcast_tensor
from distprune.models.linear_layers import LinearLayer
from distprune.oneshot.rows import whole_rows
from distprune.shards.geometry import Geometry, Split, runs_of_splits
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import cut
from tests.worlds import run_threads

LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((3,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((4,), (Shard(1),)),
    ((2, 2), (Replicate(), Shard(1))),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Shard(1), Shard(0))),
    ((2, 2), (Shard(1), Shard(1))),
    ((2, 2), (Shard(1), Replicate())),
    ((2, 3), (_StridedShard(1, split_factor=3), Shard(1))),
    ((2, 3), (_StridedShard(0, split_factor=3), Shard(0))),
    ((2, 2, 2), (_StridedShard(1, split_factor=4), _StridedShard(1, split_factor=2), Shard(1))),
]


def laid_out(whole: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    """As FSDP2 leaves it; a strided shard by its place alone, since torch does not distribute to one."""
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)
    splits: list[list[Split]] = [[] for _ in whole.shape]
    for axis, placement in enumerate(placements):
        assert isinstance(placement, Shard | _StridedShard)
        splits[placement.dim].append(
            Split(mesh.size(axis), mesh.get_local_rank(axis), getattr(placement, "split_factor", 1))
        )
    runs = tuple(runs_of_splits(size, of_dim) for size, of_dim in zip(whole.shape, splits, strict=True))
    local = cut(whole, Geometry(tuple(whole.shape), runs)).clone()
    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())


def on_rank(_: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], transposed: bool) -> None:
    mesh, comm = init_device_mesh("cpu", mesh_shape), communicator()
    for shape in ((7, 12), (12, 5), (2, 3)):
        whole = torch.arange(shape[0] * shape[1]).view(shape).float()
        module = nn.Module()
        module.weight = nn.Parameter(laid_out(whole, mesh, placements))
        num_out, num_in = shape[::-1] if transposed else shape
        linear = LinearLayer("a", module, "weight", num_out, num_in, transposed)
        original = local_shard("a", module.weight)
        before = comm.traffic.copy()
        with whole_rows(comm, {"a": linear}, {"a.weight": bool(original.owned)}) as rows, torch.no_grad():
            mine = rows["a"]
            wanted = whole.t() if transposed else whole
            place = [row for start, stop in mine.runs for row in range(start, stop)]
            assert torch.equal(mine.weight, wanted[place])
            held = torch.zeros(num_out, dtype=torch.int64)
            held[place] += mine.owned
            assert comm.sum(held).tolist() == [1] * num_out  # every row is owned once
            mine.weight.mul_(-2).sub_(1)
        used = comm.traffic - before
        num_cuts = sum(getattr(p, "dim", None) == (0 if transposed else 1) for p in placements)
        assert used.num_rounds == 1 + 2 * num_cuts
        assert torch.equal(local_shard("a", module.weight).local, cut(-2 * whole - 1, original.geometry))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS, ids=str)
@pytest.mark.sampled(8)
def test_every_layout(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], transposed: bool) -> None:
    run_threads(torch.Size(mesh_shape).numel(), on_rank, mesh_shape, placements, transposed)


def experts_on_rank(rank: int, placement: Placement) -> None:
    mesh, comm = init_device_mesh("cpu", (3,)), communicator()
    whole = torch.arange(4 * 6 * 10).view(4, 6, 10).float()
    module = nn.Module()
    module.down_proj = nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement], src_data_rank=None))
    names = [f"x.down_proj.{expert}" for expert in range(4)]
    linears = {name: LinearLayer(name, module, "down_proj", 6, 10, False, e) for e, name in enumerate(names)}
    with whole_rows(comm, linears, {"x.down_proj": True}) as rows, torch.no_grad():
        for e in range(4):
            mine = rows[f"x.down_proj.{e}"]
            place = [row for start, stop in mine.runs for row in range(start, stop)]
            assert torch.equal(mine.weight, whole[e][place])
            assert mine.weight.shape == (len(place), 10)
            if placement == Shard(0):
                assert len(place) == (6 if e // 2 == rank else 0)
            mine.weight.neg_()
    parameter = module.down_proj
    assert isinstance(parameter, DTensor)
    assert torch.equal(parameter.full_tensor(), -whole)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
def test_experts(placement: Placement) -> None:
    run_threads(3, experts_on_rank, placement)


def broadcast_on_rank(rank: int) -> None:
    comm = communicator()
    values = torch.full((3, 2), float(rank))
    assert broadcast_tensor(comm, values, 1).tolist() == [[1.0, 1.0]] * 3
    assert (comm.traffic.num_rounds, comm.traffic.num_bytes) == (1, 24)
    assert dist.get_world_size() == 3


def test_broadcast_of_a_tensor_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distprune.collectives.tensors._PIECE_BYTES", 16)
    run_threads(3, broadcast_on_rank)
