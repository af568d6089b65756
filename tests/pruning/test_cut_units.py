"""Groups and rows that shard edges cut: who tells whom of which elements, in how many rounds and bytes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import distprune as prune
from distprune import NByM, PerRow
from distprune.patterns import cut_units
from distprune.patterns.local_units import Rectangle, find_units
from distprune.selection.highest import keep_highest_per_row
from distprune.shards.geometry import Geometry
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard
from distprune.shards.matrix import Matrix
from tests.layouts import LAYOUTS
from tests.pruning.test_patterns import BASE, check_rank, made, traffic
from tests.worlds import drawing, run_threads
from tests.wrapped import whole


@pytest.mark.parametrize("name", ["shard1", "strided", "sharded-stages"])
@pytest.mark.sampled(1)
def test_many_cut_units_travel_in_turns(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(cut_units, "_BATCH", 37)
    layout = next(layout for layout in LAYOUTS if layout.name == name)
    run_threads(4, check_rank, layout, 4, [case for case in made() if isinstance(case[0], NByM | PerRow)])


# Where units are cut: the most that a rank sends, sizes, to each of two homes how much it answers, what is told of one
# rectangle, and two words that say whether all went well.
CUT = 16 + 16 + 2 * (8 + 64) + 16


def test_only_cut_groups_travel() -> None:
    rounds, num_bytes = traffic(NByM(2, 4), 1, 52)  # one group of each row is cut
    assert rounds == 7
    assert num_bytes == BASE + CUT + 64 * 2 * 4 + 64 * 2 // 8  # keys, and a bit for each back
    assert traffic(NByM(2, 4), 1, 5200 + 4)[1] == num_bytes  # wider rows, as many cut groups


def test_cut_rows_move_at_most_a_shard() -> None:
    rounds, num_bytes = traffic(PerRow(0.5), 1, 480)
    shard = 64 * 240
    assert rounds == 7
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


def test_stages_take_their_turns_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_units, "_BATCH", 64 * 4 // 2)  # half of a rank's part of one parameter
    one, two = run_threads(2, stages_on_rank, 1), run_threads(4, stages_on_rank, 2)
    assert {zeros for _, of_rank in (*one, *two) for zeros in of_rank} == {64}
    alone = run_threads(2, stages_on_rank, 1)[0][0]
    assert two[0][0] == alone + 4  # but for the rounds in which stages tell each other what they hold


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

    for error in run_threads(2, shard_on_rank, lambda: DeviceMesh("cpu", [0, 1]), changed, catch=True):
        assert isinstance(error, ValueError)
        assert "ranks do not hold all of the groups or rows of 'w' that they hold parts of" in str(error)


def test_turns_are_equal_where_homes_have_few_rows() -> None:
    rows, columns = np.arange(4), np.arange(16)
    line = cut_units.Line(range(4), 4, [Rectangle(rows, columns, 16 * rows, columns)], is_told_by_all=True)
    part = cut_units.CutPart("w", 64, line, torch.device("cpu"), torch.int32, None, torch.isnan)
    for num_turns in (1, 2, 4):
        sizes = [sum(piece.numel for _, piece in part.pieces(0, turn, num_turns)) for turn in range(num_turns)]
        assert sizes == [64 // num_turns] * num_turns


STRETCHED = [(Matrix(3, 4), 2), (Matrix(3, 4, transposed=True), 2), (Matrix(3, 4, transposed=True, num_matrices=2), 4)]


@pytest.mark.parametrize(("matrix", "length"), STRETCHED)
def test_each_element_of_a_stretch_is_whole_or_cut_once(matrix: Matrix, length: int) -> None:
    numel = matrix.num_rows * matrix.num_in
    for start, stop in itertools.combinations(range(numel + 1), 2):
        geometry = Geometry.rows((numel,), start, stop)
        units, places = find_units(geometry, matrix, length), matrix.place(np.arange(start, stop))
        of_whole = units.begin + units.matrix.offsets(units.matrix.rows, units.whole)
        found = [*of_whole.reshape(-1).tolist()]
        assert len(found) % length == 0
        for each in units.cut:
            there = each.offsets(0, len(each.rows), torch.device("cpu"))
            offsets = np.arange(numel)[there] if isinstance(there, slice) else there.numpy()
            assert places[0][offsets].tolist() == each.rows.repeat(len(each.columns)).tolist()
            assert places[1][offsets].tolist() == np.tile(each.columns, len(each.rows)).tolist()
            found += offsets.tolist()
        assert sorted(found) == list(range(stop - start))
