"""Groups and rows that shard edges cut: who tells whom of which elements, in how many rounds and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distprune as prune
from distprune import NByM, PerRow
from distprune.patterns import cut_bands
from distprune.selection.highest import keep_highest_per_row
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard
from distprune.shards.matrix import Matrix
from tests.pruning.test_patterns import BASE, traffic
from tests.worlds import all_raise, drawing, run_threads
from tests.wrapped import whole

# Where units are cut: 8 bytes to each of two ranks, what is told of one parameter's part to each of two homes, and two
# words that say whether all went well. Each row is a run.
CUT = 16 + 2 * (8 + 24) + 64 * 16 + 16


def test_only_cut_groups_travel() -> None:
    rounds, num_bytes = traffic(NByM(2, 4), 1, 52)  # one group of each row is cut
    assert rounds == 6
    assert num_bytes == BASE + CUT + 64 * 2 * 4 + 64 * 2 // 8  # keys, and a bit for each back
    assert traffic(NByM(2, 4), 1, 5200 + 4)[1] == num_bytes  # wider rows, as many cut groups


def test_cut_rows_move_at_most_a_shard() -> None:
    rounds, num_bytes = traffic(PerRow(0.5), 1, 480)
    shard = 64 * 240
    assert rounds == 6
    assert num_bytes == BASE + CUT + 4 * shard + shard // 8


def stages_on_rank(rank: int, num_stages: int) -> tuple[int, list[int]]:
    mesh = init_device_mesh("cpu", (num_stages, 2), mesh_dim_names=("pp", "dp"))
    module = nn.Module()
    for i in range(2):
        with drawing(i):
            weight = distribute_tensor(torch.randn(8, 16), mesh["dp"], [Shard(1)], src_data_rank=None)
        module.register_parameter(f"stage{rank // 2}_{i}", nn.Parameter(weight))
    report = prune.prune_model(module, 0.5, pattern="row", include="*")
    return report.num_rounds, [int((whole(parameter) == 0).sum()) for parameter in module.parameters()]


@pytest.mark.parametrize(("batch", "num_batches"), [(1 << 23, 1), (64 * 4, 2), (1, 2)])  # a rank's part of one, or less
def test_stages_take_their_turns_together(monkeypatch: pytest.MonkeyPatch, batch: int, num_batches: int) -> None:
    monkeypatch.setattr(cut_bands, "_BATCH", batch)
    one, two = run_threads(2, stages_on_rank, 1), run_threads(4, stages_on_rank, 2)
    assert {zeros for _, of_rank in (*one, *two) for zeros in of_rank} == {64}
    assert one[0][0] == 3 + 3 * num_batches
    assert two[0][0] - one[0][0] in (0, 4)  # at first, stages tell each other what they hold


def shard_on_rank(rank: int, mesh: Callable[[], DeviceMesh], change: Callable[[LocalShard, int], LocalShard]) -> int:
    with drawing(0):
        weight = torch.randn(8, 16)
    shard = change(local_shard("w", distribute_tensor(weight, mesh(), [Shard(1)], src_data_rank=None)), rank)
    report = prune.prune_shards([shard], 0.5, pattern="row")
    kept = keep_highest_per_row(weight.abs(), 8)[:, shard.geometry.flat_indices(0, 8)]
    assert torch.equal(shard.local != 0, kept)
    return report.num_bytes


def test_copies_on_other_meshes_are_answered() -> None:
    def side_by_side() -> DeviceMesh:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]

    num_bytes = run_threads(4, shard_on_rank, side_by_side, lambda shard, _: shard)
    # What only asks is told two of the rows, and sends none of its keys.
    assert [num - num_bytes[1] for num in num_bytes] == [4 * (8 * 8 - 2 * 16), 0, 4 * (8 * 8 - 2 * 16), 0]


def test_ranks_that_do_not_know_their_neighbours() -> None:
    def changed(shard: LocalShard, rank: int) -> LocalShard:
        return dataclasses.replace(shard, tensor=None) if rank else shard

    run_threads(2, shard_on_rank, lambda: DeviceMesh("cpu", [1, 0]), changed)


def test_rows_of_which_a_part_is_missing_are_refused() -> None:
    def changed(shard: LocalShard, rank: int) -> LocalShard:
        return dataclasses.replace(shard, matrix=Matrix(16, 8, transposed=True)) if rank else shard

    all_raise(
        2,
        shard_on_rank,
        lambda: DeviceMesh("cpu", [0, 1]),
        changed,
        kind=ValueError,
        match="ranks do not hold all of the groups or rows of 'w' that they hold parts of",
    )
