"""Geometry is plain ints: compared with torch's own splitting, and with itself turned round."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from distprune.shards.geometry import _ROOT, Geometry, Split, runs_of_splits


def indices(runs: tuple[tuple[int, int], ...]) -> list[int]:
    return [i for low, high in runs for i in range(low, high)]


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9, 17])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 8])
def test_one_split_is_torch_chunk(size: int, num_chunks: int) -> None:
    pieces = torch.arange(size).chunk(num_chunks)
    for index in range(num_chunks):
        wanted = pieces[index].tolist() if index < len(pieces) else []
        assert indices(runs_of_splits(size, [Split(num_chunks, index)])) == wanted


@pytest.mark.parametrize("size", [1, 4, 5, 7, 9, 16])
@pytest.mark.parametrize(("outer_size", "inner_size"), [(2, 2), (2, 4), (4, 2), (3, 2)])
def test_a_strided_split_is_applied_after_the_inner_one(size: int, outer_size: int, inner_size: int) -> None:
    """Fully sharded on top of tensor parallel: 9 rows over (4, 2) is uneven on both levels."""
    seen: list[int] = []
    for outer, inner in itertools.product(range(outer_size), range(inner_size)):
        pieces = torch.arange(size).chunk(inner_size)
        pieces = (pieces[inner] if inner < len(pieces) else torch.arange(0)).chunk(outer_size)
        wanted = pieces[outer].tolist() if outer < len(pieces) else []
        splits = [Split(outer_size, outer, stride=inner_size), Split(inner_size, inner)]
        assert indices(runs_of_splits(size, splits)) == wanted
        seen += wanted
    assert sorted(seen) == list(range(size))


def test_strided_splits_are_applied_from_the_last_to_the_first() -> None:
    """Three axes cut one dim, each on top of those behind it, as in ``(_StridedShard, _StridedShard, Shard)``."""
    for first, second, third in itertools.product(range(2), repeat=3):
        splits = [Split(2, first, stride=4), Split(2, second, stride=2), Split(2, third)]
        assert indices(runs_of_splits(8, splits)) == [4 * third + 2 * second + first]


def test_a_strided_split_alone_interleaves() -> None:
    assert runs_of_splits(8, [Split(2, 0, stride=2)]) == ((0, 2), (4, 6))
    assert runs_of_splits(8, [Split(2, 1, stride=2)]) == ((2, 4), (6, 8))


GEOMETRIES = [
    Geometry.whole((3, 4)),
    Geometry.whole(()),
    Geometry.whole((0, 4)),
    Geometry.rows((4, 0), 1, 3),
    Geometry.whole((2, 0, 3)),
    Geometry.nothing((3, 4)),
    Geometry.nothing(()),
    Geometry((7,), (((2, 5),),)),
    Geometry((6, 4), (((2, 5),), ((0, 4),))),
    Geometry((6, 4), (((0, 6),), ((1, 3),))),
    Geometry((6, 4), (((3, 4),), ((1, 3),))),
    Geometry((6, 4), (((0, 2), (3, 5)), ((0, 1), (2, 4)))),
    Geometry((3, 4, 5), (((1, 2),), ((1, 3),), ((0, 5),))),
    Geometry((3, 4, 5), (((0, 3),), ((1, 3),), ((0, 2), (3, 4)))),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_flat_indices(geometry: Geometry) -> None:
    whole = torch.arange(geometry.global_numel).view(geometry.global_shape)
    local = whole
    if geometry.global_shape:
        for dim, runs in enumerate(geometry.dim_runs):
            local = local.index_select(dim, torch.tensor(indices(runs), dtype=torch.int64))
    elif geometry.local_numel == 0:
        local = whole.new_empty(0)
    assert tuple(local.shape) == geometry.local_shape
    flat = local.flatten().numpy()
    for start, stop in itertools.combinations_with_replacement(range(geometry.local_numel + 1), 2):
        assert np.array_equal(geometry.flat_indices(start, stop), flat[start:stop])
    offsets = torch.arange(geometry.local_numel).flip(0)
    assert np.array_equal(geometry.flat_indices_at(offsets), flat[::-1])
    prime, root = Geometry.PRIME, _ROOT
    assert geometry.fingerprint() == sum(pow(root, int(i), prime) for i in flat) % prime
    if geometry.flat_start is not None:
        assert np.array_equal(flat, np.arange(geometry.flat_start, geometry.flat_start + len(flat)))
