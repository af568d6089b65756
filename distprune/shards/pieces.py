"""A parameter spread over ranks and cut into pieces, where no unit is parted: plain ints, no ranks.

Noun: the *grain* of a dim is what it may be cut at multiples of; a grain of the dim's size leaves it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distprune.shards.geometry import Geometry
from distprune.shards.matrix import Matrix

_ENOUGH = 16  # grains a rank: from then on shares differ by less than a tenth


def grain_of(shape: Sequence[int], matrix: Matrix, unit: tuple[int, int]) -> tuple[int, ...]:
    """Return the grain of every dim of ``shape``, of a parameter that is ``matrix``; ``unit``: of its pattern."""
    num_rows, num_inputs = unit
    if matrix.transposed:
        return (*(1,) * (len(shape) - 2), num_inputs, num_rows)
    lead = matrix.input_dims(shape).start
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


def pieces_of(geometry: Geometry, grain: Sequence[int], numel: int, dim: int = 0) -> Iterator[Geometry]:
    """Yield what ``geometry`` holds in pieces of ``numel`` elements, or a grain, at most. It is cut from ``dim`` on."""
    if geometry.local_numel <= numel or dim == len(grain):
        if geometry.local_numel:
            yield geometry
        return
    runs = geometry.dim_runs
    step = max(1, numel // (geometry.local_numel // geometry.local_shape[dim] * grain[dim])) * grain[dim]
    for start, stop in runs[dim]:
        for low in range(start, stop, step):
            piece = Geometry(geometry.global_shape, (*runs[:dim], ((low, min(low + step, stop)),), *runs[dim + 1 :]))
            yield from pieces_of(piece, grain, numel, dim + 1)


def within(geometry: Geometry, bounds: Sequence[tuple[int, int]]) -> Geometry:
    """Return what ``geometry`` holds between the two ``bounds`` of every dim."""
    runs = (
        tuple((max(low, start), min(high, stop)) for low, high in held if max(low, start) < min(high, stop))
        for held, (start, stop) in zip(geometry.dim_runs, bounds, strict=True)
    )
    return Geometry(geometry.global_shape, tuple(runs))
