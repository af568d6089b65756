"""The values of one of the model's tensors where they are stored: in one tensor as it is, or in regions of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from distprune.checkpoint.regions import Region, extents
from distprune.checkpoint.tiled import Tile, Tiled
from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import cut


class StoredValues:
    """The values in ``regions``, all those of one tensor of the model; ``tensors``: what is stored, by name."""

    def __init__(self, regions: Sequence[Region], tensors: Mapping[str, torch.Tensor]) -> None:
        self.shape = extents(regions)
        self._parts = [(region, tensors[region.stored]) for region in regions]
        self._bounds = np.array([region.bounds for region in regions]).reshape(len(regions), -1, 2)

    @cached_property
    def is_as_stored(self) -> bool:
        """Whether it is one stored tensor."""
        region, stored = self._parts[0]
        return len(self._parts) == 1 and region == Region.whole(region.stored, region.name, stored.shape)

    @property
    def edges(self) -> list[list[int]]:
        """Where each dim is parted, its ends included."""
        return [np.unique(self._bounds[:, dim]).tolist() for dim in range(len(self.shape))]

    def cut(self, geometry: Geometry) -> torch.Tensor:
        """Return the part that ``geometry`` names, of the tensor, or, where it is one as it is stored, of it as one
        line: a view, of the kind :class:`Tiled` where several regions have a part of it. Local."""
        if self.is_as_stored:
            return cut(self._parts[0][1].reshape(geometry.global_shape), geometry)
        tiles: list[Tile] = []
        ends = np.array([[runs[0][0], runs[-1][1]] if runs else [0, 0] for runs in geometry.dim_runs])
        touched = (self._bounds[:, :, 0] < ends[:, 1]) & (self._bounds[:, :, 1] > ends[:, 0])
        for number in np.flatnonzero(touched.all(axis=1)):
            region, stored = self._parts[number]
            slices, part = region.inside(geometry, stored.shape)
            if part.local_numel:
                tiles.append((tuple(of.start for of in slices), region.as_in_model(cut(stored, part))))
        if not tiles:
            return self._parts[0][1].new_empty(geometry.local_shape)
        return tiles[0][1] if len(tiles) == 1 else Tiled(geometry.local_shape, tiles)
