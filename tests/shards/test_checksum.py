"""A checksum tells tensors apart."""

from __future__ import annotations

import torch

from distprune.shards import checksum


def test_one_bit_and_order_tell() -> None:
    torch.manual_seed(0)
    values = torch.randn(70_000)
    base = checksum([values])
    assert checksum([values.clone()]) == base < 1 << 61
    swapped, flipped = values.clone(), values.clone()
    swapped[[5, 69_000]] = values[[69_000, 5]]
    flipped.view(torch.int32)[66_000] ^= 1
    assert len({base, checksum([swapped]), checksum([flipped])}) == 3


def test_several_tensors_and_their_order_tell() -> None:
    first, second = torch.ones(3), torch.tensor([True, False])
    assert len({checksum([first]), checksum([first, second]), checksum([second, first]), checksum([])}) == 4


def test_what_is_not_contiguous() -> None:
    values = torch.arange(200_000.0).view(400, 500)
    assert checksum([values.t()]) == checksum([values.t().clone()])
