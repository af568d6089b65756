"""Addends on a grid: in one pass they come to the integers that three passes come to."""

from __future__ import annotations

import math

import pytest
import torch

from distprune.scores.exact_sum import grid_scale, on_grid, summable


@pytest.mark.parametrize(
    ("num_addends", "signed"), [(255, False), (256, False), (256, True), (512, True), (9999, True)]
)
def test_one_pass_rounds_as_three_do(num_addends: int, signed: bool) -> None:
    largest = math.nextafter(1.0, 0.0)
    scale = grid_scale(num_addends, largest)
    halves = torch.arange(-9, 10, dtype=torch.float64) / 2 ** (scale + 1)
    random = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        addends = torch.cat([halves, random, random**9, torch.tensor([largest, -largest, 0.0, -0.0])]).to(dtype)
        addends = addends if signed else addends.abs()
        integers, offset = summable(addends, scale, num_addends, signed=signed)
        assert (offset != 0) == (num_addends >= (512 if signed else 256))
        assert torch.equal(integers - offset, on_grid(addends, scale))
