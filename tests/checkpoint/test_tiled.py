"""A tensor in tiles is read as the whole one is."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from distprune.checkpoint.tiled import Tile, Tiled
from distprune.shards.local_shard import flat_chunk

# Shapes, and where their dims are parted.
GRIDS: dict[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "experts": ((3, 8, 5), ((0, 1, 2, 3), (0, 4, 8), (0, 5))),
    "columns": ((4, 9), ((0, 4), (0, 2, 7, 9))),
    "line": ((11,), ((0, 4, 6, 11),)),
    "four dims": ((2, 3, 2, 4), ((0, 2), (0, 1, 3), (0, 1, 2), (0, 3, 4))),
}


@pytest.mark.parametrize("name", GRIDS)
def test_parts_are_those_of_the_whole(name: str) -> None:
    shape, edges = GRIDS[name]
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    tiles: list[Tile] = []
    for bounds in itertools.product(*(itertools.pairwise(of_dim) for of_dim in edges)):
        start, stop = (tuple(bound[end] for bound in bounds) for end in (0, 1))
        tiles.append((start, whole[tuple(map(slice, start, stop))]))
    tiled = Tiled(shape, tiles)
    assert (tiled.shape, tiled.dtype, tiled.device) == (whole.shape, whole.dtype, whole.device)
    for first in range(0, whole.numel() + 1, 3):
        for last in range(first, whole.numel() + 1, 4):
            assert torch.equal(flat_chunk(tiled, first, last), whole.flatten()[first:last])
    offsets = torch.randint(whole.numel(), (50,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.take(tiled, offsets), torch.take(whole, offsets))
    assert torch.take(tiled, offsets[:0]).shape == (0,)


def test_nothing_else_is_known_of_it() -> None:
    tiled = Tiled((2, 3), [((0, 0), torch.ones(1, 3)), ((1, 0), torch.ones(1, 3))])
    with pytest.raises(NotImplementedError, match="of a tensor in tiles"):
        tiled.add_(1)
