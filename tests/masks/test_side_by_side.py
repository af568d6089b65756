"""Small shards whose zeros are other than their masks say are found, wherever that shows, and wherever they lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from distprune.masks.in_place import goes_beside, zero_all_where_pruned
from distprune.masks.side_by_side import SideBySide

SHAPES = [(7,), (1 << 14,), (3, 5), (1,), *[(128, 128)] * 9, (2, 2)]  # more than a chunk


def made(dtypes: Sequence[torch.dtype]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return shards whose weights at odd places are pruned, and their masks; some lie scattered."""
    shards, masks = [], []
    for i, shape in enumerate(SHAPES):
        masks.append((torch.arange(torch.Size(shape).numel()) % 2 == 0).view(shape))
        shards.append((2 * masks[-1].to(dtypes[i % len(dtypes)])).t().contiguous().t())
    return shards, masks


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16], [torch.float64, torch.float16]], ids=str)
def test_what_differs_is_found(dtypes: Sequence[torch.dtype]) -> None:
    shards, masks = made(dtypes)
    assert all(map(goes_beside, shards))
    beside = SideBySide(list(zip(shards, masks, strict=True)))
    for i, shard in enumerate(shards):
        if i % 3 == 0:
            shard.share_memory_()  # type: ignore[no-untyped-call]
        for at in (0, -1):
            place = (at,) * shard.ndim
            before = shard[place].clone()
            shard[place] = 0 if before else 1
            assert beside.differing() == [i]
            shard[place] = before
            assert beside.differing() == []
    for i in (0, 4, len(shards) - 1):
        masks[i].logical_not_()
    assert beside.differing() == [0, 4, len(shards) - 1]
    numel, num_held = shards[4].numel(), shards[4].numel() // 2
    assert beside.read(4, num_held + 1) == (0, num_held, True)  # the mask stays
    assert beside.differing() == [0, 4, len(shards) - 1]
    assert beside.read(4, num_held) == (numel, num_held, False)
    assert beside.differing() == [0, len(shards) - 1]


def test_all_are_masked() -> None:
    shards, masks = made([torch.float32, torch.bfloat16])
    for shard in shards:
        shard.fill_(-torch.inf)
    zero_all_where_pruned(shards, masks)
    for shard, mask in zip(shards, masks, strict=True):
        assert torch.equal(shard.isinf(), mask)
        assert not shard[~mask].any()
        assert not shard[~mask].signbit().any()
