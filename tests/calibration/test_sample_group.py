"""Who runs the same samples is read off the layout, and what each of them takes of the statistics adds up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distprune import Unstructured
from distprune.calibration.moments import Needs
from distprune.calibration.sample_group import Axis, SampleGroup, find_sample_group
from distprune.calibration.statistics import InputStatistics
from distprune.calibration.walk import Walk
from distprune.collectives.communicator import Alone, communicator
from distprune.models.linear_layers import linear_layers
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.removal.layers import order_layers
from tests.architectures import samples, tiny_model
from tests.calibration.test_statistics import walk_of
from tests.worlds import ProcessPool, all_raise, drawing, run_threads


def two_layers() -> nn.Module:
    return nn.Sequential(OrderedDict(up=nn.Linear(8, 8), down=nn.Linear(8, 8), norm=nn.LayerNorm(8)))


PLAN = {"up": ColwiseParallel, "down": RowwiseParallel}


def groups_on_rank(_: int, shape: tuple[int, ...], shards: bool) -> SampleGroup:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    model = two_layers()
    if shape[-1] > 1:
        parallelize_module(model, mesh["tp"], {name: style() for name, style in PLAN.items()})
    if shards:
        fully_shard(model, mesh=mesh["dp"])
    sample_group = find_sample_group(communicator(), model)
    assert (sample_group.group is None) == (sample_group.size == 1)
    return SampleGroup(sample_group.number, sample_group.num_groups, sample_group.rank, sample_group.size)


def test_who_shares_samples(pool: ProcessPool) -> None:
    one_each = [SampleGroup(rank, 4) for rank in range(4)]
    assert pool.run(4, groups_on_rank, (4, 1), True) == one_each  # FSDP2
    assert pool.run(4, groups_on_rank, (4, 1), False) == one_each  # plain
    assert pool.run(4, groups_on_rank, (4,), False) == [SampleGroup(0, 1, place, 4) for place in range(4)]
    two_by_two = [SampleGroup(rank // 2, 2, rank % 2, 2) for rank in range(4)]
    assert pool.run(4, groups_on_rank, (2, 2), True) == two_by_two
    assert pool.run(4, groups_on_rank, (2, 2), False) == two_by_two  # as many copies of the model
    assert find_sample_group(Alone(), two_layers()) == SampleGroup()


def disagree(rank: int, said: list[list[int] | None]) -> None:
    ranks = said[rank]
    group: Any = dist.group.WORLD
    model: Any = None if ranks is None else Axis(tuple(ranks), group)  # in place of one that lies along it
    find_sample_group(communicator(), model)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([[0, 1], None, None], r"rank 0 shares with \[0, 1\], rank 1 shares with \[1\]"),
        ([[0, 1], [0, 1], [1, 2]], r"rank 2 shares with \[1, 2\], rank 1 shares with \[0, 1\]"),
        ([None, None, [2, 3]], r"rank 2 shares with \[2, 3\], rank 3 is not in the group"),
    ],
)
def test_ranks_that_disagree(said: list[list[int] | None], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distprune.calibration.sample_group.shared_axis", lambda axis: axis)
    all_raise(3, disagree, said, kind=ValueError, match=message)


def moments_on_rank(rank: int, needs: Needs, how: str, num_in: int) -> None:
    with drawing(0):
        block = nn.Sequential(nn.Linear(num_in, 4, bias=False))
    dtype = torch.bfloat16 if how == "cut" else torch.float32
    inputs = [torch.randn(num, num_in, generator=torch.Generator().manual_seed(num)).to(dtype) for num in (4, 0, 6)]
    wanted = InputStatistics(Alone(), Walk(block, []), linear_layers(block), needs)
    for x in inputs:
        wanted.given("0", x, None, "0")
    comm, mesh = communicator(), init_device_mesh("cpu", (3,))
    sample_group = SampleGroup(0, 1, rank, 3, mesh.get_group())
    start, stop = sample_group.features(num_in)
    statistics = InputStatistics(comm, Walk(block, [], sample_group=sample_group), linear_layers(block), needs)
    for x in inputs:
        if how == "plain":
            given = x[:, start:stop]
        elif how == "whole":
            given = x
        else:
            given = distribute_tensor(x, mesh, [Shard(1) if how == "cut" else Replicate()], src_data_rank=None)
        statistics.given("0", given, None, "0")
    # Only X^T X of inputs that are cut needs them whole: the features and a round for each sample.
    gathers = needs == "products" and (how in ("plain", "cut") or num_in == 1)
    num_bytes = 10 * 3 * -(-num_in // 3) * dtype.itemsize
    assert (comm.traffic.num_rounds, comm.traffic.num_bytes) == ((3, num_bytes) if gathers else (0, 0))
    ((found,),), ((one,),) = statistics.reduce(), wanted.reduce()
    assert found.num_tokens == one.num_tokens == 10
    torch.testing.assert_close(found.squares, one.squares)
    torch.testing.assert_close(found.mean, one.mean)
    if needs == "products" and rank == found.owner:
        torch.testing.assert_close(found.products, one.products, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", ["plain", "whole", "cut", "replicated"])
@pytest.mark.parametrize("needs", ["squares", "products"])
@pytest.mark.parametrize("num_in", [7, 1])
def test_a_sample_group_counts_its_samples_once(num_in: int, needs: Needs, how: str) -> None:
    run_threads(3, moments_on_rank, needs, how, num_in)


def wrong_inputs_on_rank(_: int, how: str) -> None:
    comm, mesh = communicator(), init_device_mesh("cpu", (2,))
    sample_group = SampleGroup(0, 1, mesh.get_local_rank(), 2, mesh.get_group())
    with drawing(0):
        block = nn.Sequential(nn.Linear(8, 4))
    x = torch.ones(4, 8)
    x = x[:, :3] if how == "width" else DTensor.from_local(x[:2], mesh, [Shard(0)])
    walk = walk_of(block, [x], sample_group=sample_group)
    statistics = InputStatistics(comm, walk, linear_layers(block), "products")
    statistics.run(0)
    list(statistics.reduce())


@pytest.mark.parametrize(
    ("how", "message"), [("width", r"Tensor \(4, 3\) where 8"), ("tokens", r"\(Shard\(dim=0\),\)")]
)
def test_inputs_cut_otherwise(how: str, message: str) -> None:
    all_raise(2, wrong_inputs_on_rank, how, kind=NotImplementedError, match=message)


def prune(model: nn.Module) -> None:
    before = [p.to_local().clone() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]
    try:
        prune_blocks(model, samples(2), method="wanda", pattern=Unstructured(0.5))
    finally:
        after = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def with_experts_cut(_: int) -> None:
    model: Any = tiny_model("mixtral")
    mesh = init_device_mesh("cpu", (2,))
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = nn.Parameter(distribute_tensor(experts.down_proj.detach(), mesh, [Shard(0)]))
    prune(model)


def with_two_axes(_: int) -> None:
    model: Any = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    mesh = init_device_mesh("cpu", (2, 2))
    weight = attention.o_proj.weight.detach()
    attention.o_proj.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0), Shard(1)]))
    prune(model)


def with_ranks_out_of_order(_: int) -> None:
    model: Any = tiny_model("llama")
    mesh = dist.device_mesh.DeviceMesh("cpu", [1, 0])
    parallelize_module(model.model.layers[0], mesh, {"mlp.gate_proj": ColwiseParallel()})
    prune(model)


def with_both_on_the_same_ranks(_: int) -> None:
    model: Any = tiny_model("llama")
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.model.layers[0], mesh=mesh)
    parallelize_module(model.model.layers[1], mesh, {"mlp.up_proj": ColwiseParallel()})
    prune(model)


def with_a_cut_sequence(_: int, walk: Callable[[nn.Module], object] = prune) -> None:
    model: Any = tiny_model("llama")
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"model.embed_tokens": embedding})
    walk(model)


def with_a_cut_sequence_and_influences(rank: int) -> None:
    with_a_cut_sequence(rank, lambda model: order_layers(model, samples(2), 2, criterion="influence"))


REFUSED = [
    (with_experts_cut, 2, r"experts 'model.layers.1.mlp.experts.down_proj' are laid out as \(Shard\(dim=0\),\)"),
    (with_two_axes, 4, r"'model.layers.1.self_attn.o_proj.weight' is laid out as .* along one mesh axis"),
    (with_ranks_out_of_order, 2, r"'model.layers.0.mlp.gate_proj.weight' lies on ranks out of order: \[1, 0\]"),
    (with_both_on_the_same_ranks, 2, r"'model.layers.1.mlp.up_proj.weight': ranks \[0, 1\] hold parts that are never"),
    (with_a_cut_sequence, 2, r"hidden states of shape \(2, 8, 24\) between blocks, for 32 tokens"),
    (with_a_cut_sequence_and_influences, 2, r"hidden states of shape \(2, 8, 24\) between blocks"),
]


@pytest.mark.parametrize(("fn", "world_size", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_refused_on_every_rank(fn: Callable[[int], object], world_size: int, message: str) -> None:
    all_raise(world_size, fn, kind=NotImplementedError, match=message)


def test_features_of_each_place() -> None:
    assert [SampleGroup(rank=place, size=3).features(7) for place in range(3)] == [(0, 3), (3, 6), (6, 7)]
    assert [SampleGroup(rank=place, size=3).features(4) for place in range(3)] == [(0, 2), (2, 4), (4, 4)]
    assert SampleGroup().features(5) == (0, 5)
