"""All rows of a layer on its owner, from every layout, and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement

from distprune.collectives.communicator import Alone, communicator
from distprune.models.linear_layers import LinearLayer
from distprune.oneshot.moved_rows import move_rows
from distprune.oneshot.rows import Rows, whole_rows
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import cut
from tests.oneshot.test_rows import LAYOUTS, laid_out
from tests.worlds import run_threads

# Layers of different shapes and dtypes, one of one byte an element and odd lengths; the first one goes nowhere.
SHAPES = [((3, 4), torch.float32), ((7, 12), torch.float32), ((12, 5), torch.int8), ((2, 3), torch.bfloat16)]


def on_rank(rank: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], transposed: bool) -> None:
    mesh, comm = init_device_mesh("cpu", mesh_shape), communicator()
    modules = [nn.Module() for _ in SHAPES]
    wholes = [torch.arange(shape[0] * shape[1]).view(shape).to(dtype) for shape, dtype in SHAPES]
    linears = {}
    for i, (module, whole) in enumerate(zip(modules, wholes, strict=True)):
        module.weight = nn.Parameter(laid_out(whole, mesh, placements), requires_grad=False)
        num_out, num_in = whole.shape[::-1] if transposed else whole.shape
        linears[str(i)] = LinearLayer(str(i), module, "weight", num_out, num_in, transposed)
    originals = [local_shard("a", linear.parameter) for linear in linears.values()]
    owned = {f"{i}.weight": bool(of.owned) for i, of in enumerate(originals)}
    owner = {str(i): (i + 1) % comm.size for i in range(1, len(SHAPES))}
    for num_rounds in (6, 2):  # the second time it is known who holds what
        with whole_rows(comm, linears, owned) as rows:
            before = comm.traffic.copy()
            moved = move_rows(comm, rows, owner)
            assert (comm.traffic - before).num_rounds == num_rounds
            assert moved.rows["0"] is rows["0"]
            for i, whole in enumerate(wholes[1:], 1):
                found = moved.rows[str(i)]
                wanted = whole.t() if transposed else whole
                assert found.num_out == len(wanted)
                assert found.owned == (rank == owner[str(i)])
                assert torch.equal(found.weight, wanted if found.owned else wanted[:0])
                assert found.runs == (((0, len(wanted)),) if found.owned else ())
                found.weight.neg_()
                whole.neg_()
            before = comm.traffic.copy()
            moved.back()
            assert (comm.traffic - before).num_rounds == 2
        for linear, original, whole in zip(linears.values(), originals, wholes, strict=True):
            assert torch.equal(local_shard("a", linear.parameter).local, cut(whole, original.geometry))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS, ids=str)
@pytest.mark.sampled(8)
def test_every_layout(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], transposed: bool) -> None:
    run_threads(torch.Size(mesh_shape).numel(), on_rank, mesh_shape, placements, transposed)


def replicated(rank: int) -> None:
    """Whole on every rank, as DDP has it: nothing moves there, and what the owner writes is everywhere afterwards."""
    comm = communicator()
    weight = torch.arange(12.0).view(4, 3)
    rows = {"a": Rows(weight, ((0, 4),), 4, owned=rank == 0)}
    for num_bytes in (250, 64 + 24):  # who holds what, and flags
        before = comm.traffic.copy()
        moved = move_rows(comm, rows, {"a": 1})
        assert (comm.traffic - before).num_bytes <= num_bytes
        if rank == 1:
            assert moved.rows["a"].weight is weight
            weight.add_(1)
        before = comm.traffic.copy()
        moved.back()
        assert (comm.traffic - before).num_bytes == {0: 136, 1: 184, 2: 136}[rank]  # 24 of flags, and 64
    assert torch.equal(weight, torch.arange(12.0).view(4, 3) + 2)


def test_what_all_hold_does_not_move() -> None:
    run_threads(3, replicated)


def test_one_rank_works_in_place() -> None:
    weight = torch.randn(4, 3)
    rows = {"a": Rows(weight.t(), ((0, 3),), 3, owned=True)}
    moved = move_rows(Alone(), rows, {"a": 0})
    assert moved.rows["a"].weight is rows["a"].weight
    moved.back()


def with_shards(rank: int) -> int:
    comm = communicator()
    runs = ((100 * rank, 100 * rank + 100),)
    rows = {name: Rows(torch.ones(100, 50), runs, 400, owned=True) for name in "ab"}
    before = comm.traffic.copy()
    move_rows(comm, rows, {"a": 0, "b": 1}).back()
    return (comm.traffic - before).num_bytes


def test_a_rank_hands_over_what_it_holds() -> None:
    """Of two layers of 4 x 20,000 bytes: a owner gets 60,000 and hands on 20,000; then the other way round."""
    for rank, num_bytes in enumerate(run_threads(4, with_shards)):
        assert 0 <= num_bytes - 2 * (60_000 if rank < 2 else 40_000) < 500


def change_places(rank: int, turned: bool) -> None:
    """Two ranks hold halves, the first one the upper half, or the lower; with the same runs, which are known by now."""
    comm, start = communicator(), 2 * (rank != turned)
    whole = torch.arange(12.0).view(4, 3)
    rows = {"a": Rows(whole[start : start + 2].clone(), ((start, start + 2),), 4, owned=True)}
    moved = move_rows(comm, rows, {"a": 0})
    assert torch.equal(moved.rows["a"].weight, whole if rank == 0 else whole[:0])
    moved.back()
    assert torch.equal(rows["a"].weight, whole[start : start + 2])


def test_ranks_that_change_places_find_out_anew() -> None:
    for turned in (False, True, False):
        run_threads(2, change_places, turned)
