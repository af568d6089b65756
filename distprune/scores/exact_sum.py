"""Sums that are the same in any order: addends rounded to a common grid and summed as integers.

The spacing of the grid is a power of two. It follows from the largest addend and the number of addends alone, so
every layout gives the same bits. For 2**24 addends it is finer than the largest addend times 2**-35.
"""

from __future__ import annotations

import math
import struct

import torch

_MAX_FACTOR = 1000  # of exponents of 2
_MANTISSA_BITS = 52  # of a float64
_SUM_BITS = 61  # of an int64: a sign, and room for rounding up


def grid_scale(num_addends: int, largest: float) -> int:
    """Return the power of two that turns addends into integers whose sums fit into 64 bits."""
    exponent = math.frexp(largest)[1] if largest > 0 else 0
    return _SUM_BITS - exponent - max(num_addends, 1).bit_length()


def on_grid(addends: torch.Tensor, scale: int) -> torch.Tensor:
    """Return finite ``addends`` as multiples of 2**-scale (int64, new).

    They are of any dtype but 8-bit floats, which torch does not multiply.
    """
    if abs(scale) > _MAX_FACTOR:  # 2**scale alone may be no float64
        half = scale // 2
        addends, scale = addends * _full(2.0**half, addends), scale - half
    return (addends * _full(2.0**scale, addends)).round_().to(torch.int64)


def summable(addends: torch.Tensor, scale: int, num_addends: int, *, signed: bool) -> tuple[torch.Tensor, int]:
    """Return integers (int64) and an offset: each integer is that of :func:`on_grid` plus the offset; sums wrap.

    ``scale`` is that of :func:`grid_scale` for ``num_addends`` or more; unless ``signed``, no addend is negative. From
    2**52 to 2**53 the spacing of float64 is 1: a sum with a constant there is rounded to an integer, half to even as
    ``round`` does, and its bits count up by 1. That is one pass; :func:`on_grid` takes three.
    """
    num_bits = _SUM_BITS - max(num_addends, 1).bit_length()  # of the largest multiple
    if num_bits > _MANTISSA_BITS - signed or abs(scale) > _MAX_FACTOR:
        return on_grid(addends, scale), 0
    base = 2.0**_MANTISSA_BITS * (1.5 if signed else 1.0)
    (offset,) = struct.unpack("<q", struct.pack("<d", base))
    return torch.add(_full(base, addends), addends, alpha=2.0**scale).view(torch.int64), offset


def _full(number: float, like: torch.Tensor) -> torch.Tensor:
    """Return ``number`` as a float64: so are products with it."""
    return torch.full((1,) * like.ndim, number, dtype=torch.float64, device=like.device)
