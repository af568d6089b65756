"""A parameter spread over ranks and cut into pieces, where no unit is parted: plain ints, no ranks.

Noun: the *grain* of a dim is what it may be cut at multiples of; a grain of the dim's size leaves it whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from distprune.shards.geometry import Geometry
from distprune.shards.matrix import Matrix

__all__ = ["grain_of", "pieces_of", "share_of"]

_ENOUGH = 16  # grains a rank: from then on shares differ by less than a tenth


def grain_of(shape: Sequence[int], matrix: Matrix, unit: tuple[int, int]) -> tuple[int, ...]:
    """Return the grain of every dim of ``shape``, of a parameter that is ``matrix``; ``unit``: of its pattern."""
    num_rows, num_inputs = unit
    if matrix.transposed:
        return (*(1,) * (len(shape) - 2), num_inputs, num_rows)
    lead = next(d for d in range(1, len(shape)) if math.prod(shape[:d]) == matrix.num_rows)
    return (*(1,) * (lead - 1), num_rows, *shape[lead:])


def share_of(shape: Sequence[int], grain: Sequence[int], rank: int, num_ranks: int) -> Geometry:
    """Return the part of ``rank``: an even share along the first dim that has one for every rank, or nearly."""
    nums = [size // max(step, 1) for size, step in zip(shape, grain, strict=True)]
    even = (d for d, num in enumerate(nums) if num and (num % num_ranks == 0 or num >= _ENOUGH * num_ranks))
    dim = next(even, nums.index(max(nums)))
    start, stop = (nums[dim] * r // num_ranks * grain[dim] for r in (rank, rank + 1))
    runs = list(Geometry.whole(shape).dim_runs)
    runs[dim] = ((start, stop),) if start < stop else ()
    return Geometry(tuple(shape), tuple(runs))


def pieces_of(geometry: Geometry, grain: Sequence[int], numel: int) -> Iterator[Geometry]:
    """Yield what ``geometry``, one run in each dim, holds in pieces of ``numel`` elements, or a grain, at most."""
    if geometry.local_numel:
        yield from _cut(geometry, grain, numel, 0)


def _cut(geometry: Geometry, grain: Sequence[int], numel: int, dim: int) -> Iterator[Geometry]:
    if geometry.local_numel <= numel or dim == len(grain):
        yield geometry
        return
    runs = geometry.dim_runs
    ((start, stop),) = runs[dim]
    step = max(1, numel // (geometry.local_numel // (stop - start) * grain[dim])) * grain[dim]
    for low in range(start, stop, step):
        piece = Geometry(geometry.global_shape, (*runs[:dim], ((low, min(low + step, stop)),), *runs[dim + 1 :]))
        yield from _cut(piece, grain, numel, dim + 1)
