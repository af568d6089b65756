"""Sums that are the same in any order: addends rounded to a common grid and summed as integers.

The spacing of the grid is a power of two. It follows from the largest addend and the number of addends alone, so
every layout gives the same bits. For 2**24 addends it is finer than the largest addend times 2**-35.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MAX_FACTOR = 1000  # of exponents of 2
_SUM_BITS = 61  # of an int64: a sign, and room for rounding up


def grid_scale(num_addends: int, largest: float) -> int:
    """Return the power of two that turns addends into integers whose sums fit into 64 bits."""
    exponent = math.frexp(largest)[1] if largest > 0 else 0
    return _SUM_BITS - exponent - max(num_addends, 1).bit_length()


def on_grid(addends: torch.Tensor, scales: Sequence[int]) -> torch.Tensor:
    """Return finite ``addends`` (float64) as multiples of 2**-scale (int64, new). ``scales``: of each row, or all."""
    if max(map(abs, scales)) > _MAX_FACTOR:  # 2**scale alone may be no float64
        halves = [scale // 2 for scale in scales]
        addends, scales = addends * _powers(halves, addends), [s - h for s, h in zip(scales, halves, strict=True)]
    return (addends * _powers(scales, addends)).round_().to(torch.int64)


def _powers(exponents: Sequence[int], like: torch.Tensor) -> torch.Tensor | float:
    """Return powers of two, one a row."""
    powers = [2.0**exponent for exponent in exponents]
    return powers[0] if len(powers) == 1 else torch.tensor(powers, dtype=torch.float64, device=like.device)[:, None]
