"""Sums that are the same in any order: addends rounded to a common grid and summed as integers.

The spacing of the grid is a power of two. It follows from the largest addend and the number of addends alone, so
every layout gives the same bits. For 2**24 addends it is finer than the largest addend times 2**-35.
"""

from __future__ import annotations

import math

import torch

_MAX_FACTOR = 1000  # of exponents of 2
_SUM_BITS = 61  # of an int64: a sign, and room for rounding up


def grid_scale(num_addends: int, largest: float) -> int:
    """Return the power of two that turns addends into integers whose sums fit into 64 bits."""
    exponent = math.frexp(largest)[1] if largest > 0 else 0
    return _SUM_BITS - exponent - max(num_addends, 1).bit_length()


def on_grid(addends: torch.Tensor, scale: int) -> torch.Tensor:
    """Return finite ``addends`` (float64) as multiples of 2**-scale (int64, new)."""
    if abs(scale) > _MAX_FACTOR:  # 2**scale alone may be no float64
        half = scale // 2
        addends, scale = addends * 2.0**half, scale - half
    return (addends * 2.0**scale).round_().to(torch.int64)
