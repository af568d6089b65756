"""Shards on a device and their masks, all together, come to what each comes to on the host."""

from __future__ import annotations

import pytest
import torch

from distprune.masks.grouped import Grouped
from distprune.masks.in_place import read_kept, write_signed_zeros
from distprune.shards.local_shard import bits_of
from tests.device_path import as_on_a_device, counted_waits, counted_work

SHAPES = [(7,), (1 << 10,), (3, 5), (), (0, 4), (60, 70), (2, 2)]  # parts of chunks and more than one
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
DEVICE = torch.device("cpu")


def made(num: int = 2) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return shards with zeros of both signs, and masks that say something else; some lie scattered."""
    generator = torch.Generator().manual_seed(3)
    shards, masks = [], []
    for i, shape in enumerate(SHAPES * num):
        values = torch.randn(shape, generator=generator).round().mul(3).to(DTYPES[i % len(DTYPES)])
        shards.append(values.t().contiguous().t() if values.ndim == 2 else values)
        masks.append(torch.rand(shape, generator=generator) < 0.5)
    return shards, masks


@pytest.mark.parametrize("chunk", [16, 1 << 12])
def test_what_is_read_and_written_is_the_hosts(chunk: int) -> None:
    shards, masks = made()
    here = [mask.clone() for mask in masks]
    least = [0 if i % 3 else shard.numel() for i, shard in enumerate(shards)]
    counts = [read_kept(shard, mask, num) for shard, mask, num in zip(shards, here, least, strict=True)]
    assert {too_few for *_, too_few in counts} == {True, False}
    with as_on_a_device(chunk):
        grouped = Grouped(list(zip(shards, masks, strict=True)), DEVICE)
        assert grouped.read(torch.tensor(least)).tolist() == [[*map(int, of_each)] for of_each in counts]
        assert all(map(torch.equal, masks, here))
        for shard in shards:
            shard.share_memory_()  # type: ignore[no-untyped-call]
        wanted = [shard.clone() for shard in shards]
        grouped.write_signed_zeros()
    for shard, other, mask in zip(shards, wanted, here, strict=True):
        write_signed_zeros(other, mask)
        assert torch.equal(bits_of(shard), bits_of(other))


def test_operations_follow_bytes_and_the_host_does_not_wait() -> None:
    nums = []
    for num in (1, 4):
        with as_on_a_device(1 << 16):
            grouped = Grouped(list(zip(*made(num), strict=True)), DEVICE)
            least = torch.zeros(num * len(SHAPES), dtype=torch.int64)
            grouped.read(least)
            with counted_waits() as waits, counted_work() as work:
                grouped.read(least)
                grouped.write_signed_zeros()
        assert not waits.calls
        nums.append(work.num)
    assert nums[0] == nums[1]
