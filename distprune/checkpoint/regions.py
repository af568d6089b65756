"""Where a stored tensor is in the model: a region of one of its tensors, or of several.

Transformers holds some weights in another form than checkpoints do: all experts of a block in one 3-D parameter where
one matrix an expert is stored, or apart what is stored side by side.

Noun: a *region* is a box in a tensor of the model, a half-open range along each dim, and in a stored tensor a box of
the same elements. A dim in which the first one has size 1 may be missing in the other (the number of an expert), and
the order of dims may differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard
from distprune.shards.pieces import within

Shape = tuple[int, ...]


class Region(NamedTuple):
    """A box of the stored tensor ``stored`` that is a box of the model's tensor ``name``.

    ``bounds``: (start, stop) along each dim of ``name``. ``dims``: along each dim of ``stored``, which dim of ``name``
    runs. ``stored_start``: where the box begins in ``stored``.
    """

    stored: str
    name: str
    bounds: tuple[tuple[int, int], ...]
    dims: tuple[int, ...]
    stored_start: Shape

    @staticmethod
    def whole(stored: str, name: str, shape: Sequence[int]) -> Region:
        """Return the region of a tensor of ``shape`` that is stored as it is."""
        return Region(stored, name, tuple((0, size) for size in shape), tuple(range(len(shape))), (0,) * len(shape))

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.bounds)

    @property
    def stored_bounds(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) along each dim of the stored tensor."""
        sizes = (self.bounds[dim][1] - self.bounds[dim][0] for dim in self.dims)
        return tuple((start, start + size) for start, size in zip(self.stored_start, sizes, strict=True))

    def unsqueezed(self, dim: int) -> Region:
        """Return the region of the model's tensor with another ``dim``, of size 1."""
        bounds = (*self.bounds[:dim], (0, 1), *self.bounds[dim:])
        return self._replace(bounds=bounds, dims=tuple(other + (other >= dim) for other in self.dims))

    def permuted(self, order: Sequence[int]) -> Region:
        """Return the region of the model's tensor with its dims in this order."""
        bounds = tuple(self.bounds[dim] for dim in order)
        return self._replace(bounds=bounds, dims=tuple(order.index(dim) for dim in self.dims))

    def moved(self, dim: int, by: int) -> Region:
        """Return the region so many indices further along ``dim`` of the model's tensor."""
        start, stop = self.bounds[dim]
        return self._replace(bounds=(*self.bounds[:dim], (start + by, stop + by), *self.bounds[dim + 1 :]))

    def narrowed(self, dim: int, start: int, size: int) -> Region:
        """Return what of the region is in ``size`` indices from ``start`` on along ``dim``, counted from there."""
        low, high = self.bounds[dim]
        first = max(low, start)
        inside = (first - start, max(min(high, start + size), first) - start)
        places = zip(self.dims, self.stored_start, strict=True)
        return self._replace(
            bounds=(*self.bounds[:dim], inside, *self.bounds[dim + 1 :]),
            stored_start=tuple(place + (first - low) * (other == dim) for other, place in places),
        )

    def from_zero(self, name: str) -> Region:
        """Return the region as all of a tensor ``name`` of its size."""
        return self._replace(name=name, bounds=tuple((0, stop - start) for start, stop in self.bounds))

    def part_of(self, shard: LocalShard, stored_shape: Sequence[int]) -> LocalShard:
        """Return what ``shard``, of the model's tensor, holds of the stored one: a shard of that, and a view. Local."""
        box, local = within(shard.geometry, self.bounds), shard.local
        if box.local_numel == 0:
            geometry = Geometry.nothing(stored_shape)
            local = local.new_empty(geometry.local_shape)
        else:
            for dim, (held, size) in enumerate(zip(shard.geometry.dim_runs, box.local_shape, strict=True)):
                start = self.bounds[dim][0]
                local = local.narrow(dim, sum(max(min(high, start) - low, 0) for low, high in held), size)
            others = [dim for dim in range(local.ndim) if dim not in self.dims]  # of size 1
            local = local.permute((*others, *self.dims))[(0,) * len(others)]
            shifts = [first - self.bounds[dim][0] for dim, first in zip(self.dims, self.stored_start, strict=True)]
            runs = (
                tuple((low + shift, high + shift) for low, high in box.dim_runs[dim])
                for dim, shift in zip(self.dims, shifts, strict=True)
            )
            geometry = Geometry(tuple(stored_shape), tuple(runs))
        return dataclasses.replace(
            shard, name=self.stored, local=local, geometry=geometry, matrix=None, tensor=None, original_shape=None
        )

    def view_of(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the box of the stored tensor, with the dims that it has in the model: a view. Local."""
        stored = stored[tuple(slice(*bounds) for bounds in self.stored_bounds)]
        stored = stored.permute([self.dims.index(dim) for dim in sorted(self.dims)])
        return stored[tuple(slice(None) if dim in self.dims else None for dim in range(len(self.bounds)))]


def regions_by_name(regions: Iterable[Sequence[Region]]) -> dict[str, list[Region]]:
    """Return the regions of every tensor of the model, by its name."""
    by_name: dict[str, list[Region]] = {}
    for region in itertools.chain.from_iterable(regions):
        by_name.setdefault(region.name, []).append(region)
    return by_name


def extents(regions: Sequence[Region]) -> Shape:
    """Return the shape of the tensor that ``regions`` make, all those of one tensor of the model."""
    return tuple(max(stop for _, stop in bounds) for bounds in zip(*(region.bounds for region in regions), strict=True))


def fitted(regions: Mapping[str, Sequence[Region]], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of the stored tensors that are left where the model's tensors have become ``shapes``.

    A tensor of ``shapes`` that is as before keeps its regions. Along a dim that is another size, what spanned it spans
    it; what was stacked along it (experts) is there as often as there is room, the last ones are not; and parts side by
    side are equal parts, as they were.

    Raises:
        NotImplementedError: the parts are not equal.
    """
    parts = {name: _parts(made_of) for name, made_of in regions_by_name(regions.values()).items()}
    left: dict[str, Shape] = {}
    for stored, places in regions.items():
        sizes: list[dict[int, int]] = [{} for _ in places[0].dims]  # along each dim, by where a part starts
        for region in places:
            if region.name not in shapes:
                continue
            lengths = [
                _length(region, dim, parts[region.name][dim], size) for dim, size in enumerate(shapes[region.name])
            ]
            if all(length or dim in region.dims for dim, length in enumerate(lengths)):
                for size_at, dim, start in zip(sizes, region.dims, region.stored_start, strict=True):
                    size_at[start] = lengths[dim]
                left[stored] = tuple(sum(size_at.values()) for size_at in sizes)
    return left


def _parts(regions: Sequence[Region]) -> list[list[tuple[int, int]]]:
    """Return the parts, along each dim, that a tensor is made of."""
    return [sorted(set(bounds)) for bounds in zip(*(region.bounds for region in regions), strict=True)]


def _length(region: Region, dim: int, parts: Sequence[tuple[int, int]], size: int) -> int:
    """Return how long ``region`` is along ``dim`` where that is ``size`` long; its parts were ``parts``."""
    start, stop = region.bounds[dim]
    if size == parts[-1][1]:
        return stop - start
    if dim not in region.dims:
        return int(start < size)
    if size % len(parts) or any(high - low != stop - start for low, high in parts):
        raise NotImplementedError(
            f"{region.name!r} is stored in {len(parts)} parts, {region.stored!r} among them, which are not of one size "
            f"where dim {dim} is {size}: it cannot be written as it was stored"
        )
    return size // len(parts)
