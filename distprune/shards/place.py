"""Where a shard is in the parameter that an optimizer holds, and so in its gradient and in the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from distprune.shards.layouts import is_laid_out_like, local_of
from distprune.shards.local_shard import LocalShard

__all__ = ["Place", "gradient_of", "place_of"]


@dataclass(frozen=True, eq=False)
class Place:
    """A range of a parameter's local elements: all of them, but for the flat parameters of FSDP1."""

    parameter: torch.Tensor
    start: int
    shape: tuple[int, ...]  # local, of the shard

    def part_of(self, like: torch.Tensor) -> torch.Tensor:
        """Return the shard's part of ``like``, which is laid out as the parameter: a view, of the shard's shape."""
        local = local_of(like).detach()
        if self.start == 0 and local.numel() == math.prod(self.shape):
            return local.view(self.shape)
        return local.view(-1)[self.start : self.start + math.prod(self.shape)].view(self.shape)


def place_of(shard: LocalShard, parameters: Iterable[torch.Tensor]) -> Place | None:
    """Return where ``shard`` is among ``parameters``, by the memory they share. Local."""
    own = shard.local
    for parameter in parameters:
        local = local_of(parameter).detach()
        if local.dtype is not own.dtype or local.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            continue
        start = int(own.storage_offset() - local.storage_offset())
        is_whole = start == 0 and local.numel() == own.numel()
        if is_whole or (start >= 0 and local.is_contiguous() and start + own.numel() <= local.numel()):
            return Place(parameter, start, shard.geometry.local_shape)
    return None


def gradient_of(shard: LocalShard, parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the gradient of ``shard``, of local shape; ``None`` if there is none that has been reduced. Local."""
    if shard.local.numel() == 0:
        return shard.local
    place = place_of(shard, parameters)
    gradient = None if place is None else place.parameter.grad
    if place is None or gradient is None or gradient.is_sparse:
        return None
    if isinstance(place.parameter, DTensor) and not is_laid_out_like(gradient, place.parameter):
        return None
    same_size = local_of(gradient).numel() == local_of(place.parameter).numel()
    return place.part_of(gradient) if same_size else None
