"""Shares and pieces hold every element once, and part no unit."""

from __future__ import annotations

import pytest
import torch

from distprune.shards.geometry import Geometry
from distprune.shards.matrix import Matrix
from distprune.shards.pieces import grain_of, pieces_of, share_of, within

# (shape, matrix, unit), and the grain
UNITS = [
    ((6, 8), Matrix(6, 8), (1, 4), (1, 8)),
    ((8, 6), Matrix(6, 8, transposed=True), (1, 4), (4, 1)),
    ((8, 6), Matrix(6, 8, transposed=True), (1, 8), (8, 1)),
    ((8, 12), Matrix(8, 12), (4, 4), (4, 12)),
    ((3, 6, 8), Matrix(6, 8, num_matrices=3), (1, 8), (1, 1, 8)),
    ((3, 8, 6), Matrix(6, 8, transposed=True, num_matrices=3), (2, 2), (1, 2, 2)),
    ((6, 4, 2, 2), Matrix(6, 16), (1, 16), (1, 4, 2, 2)),
    ((5, 0), Matrix(5, 0), (1, 1), (1, 0)),
]


@pytest.mark.parametrize(("shape", "matrix", "unit", "grain"), UNITS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 9])
def test_every_element_once(
    shape: tuple[int, ...], matrix: Matrix, unit: tuple[int, int], grain: tuple[int, ...], num_ranks: int
) -> None:
    assert grain_of(shape, matrix, unit) == grain
    whole = Geometry.whole(shape)
    for numel in (1, 7, 20, 1 << 20):
        found = [torch.empty(0, dtype=torch.int64)]
        for rank in range(num_ranks):
            share = share_of(shape, grain, rank, num_ranks)
            pieces = [*pieces_of(share, grain, numel)]
            assert sum(piece.local_numel for piece in pieces) == share.local_numel
            for piece in pieces:
                assert piece.local_numel <= max(numel, torch.Size(grain).numel())
                assert all(start % step == 0 for ((start, _),), step in zip(piece.dim_runs, grain, strict=True))
                found.append(piece.flat_indices(0, piece.local_numel))
        assert torch.equal(torch.cat(found).sort().values, torch.arange(whole.global_numel))


def test_shares_are_even() -> None:
    sizes = [share_of((4, 300, 8), (1, 1, 8), rank, 3).local_numel for rank in range(3)]
    assert max(sizes) - min(sizes) == 0
    assert share_of((4, 300, 8), (1, 1, 8), 1, 2) == Geometry.rows((4, 300, 8), 2, 4)


def test_what_lies_within_bounds() -> None:
    part = within(Geometry.whole((2, 14, 6)), [(1, 2), (6, 14), (0, 6)])
    assert part == Geometry((2, 14, 6), (((1, 2),), ((6, 14),), ((0, 6),)))
