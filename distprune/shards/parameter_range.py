"""Where a shard is in the parameter that an optimizer holds, and so in its gradient and in the optimizer's state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from distprune.shards.layouts import address_of, is_laid_out_like, local_of
from distprune.shards.local_shard import LocalShard


@dataclass(frozen=True, eq=False)
class ParameterRange:
    """A range of a parameter's local elements: all of them, but for the flat parameters of FSDP1."""

    parameter: torch.Tensor
    start: int
    shape: tuple[int, ...]  # local, of the shard

    def part_of(self, like: torch.Tensor) -> torch.Tensor:
        """Return the shard's part of ``like``, which is laid out as the parameter: a view, of the shard's shape."""
        local = local_of(like) if isinstance(like, DTensor) else like.detach()
        if local.shape == self.shape:
            return local
        if self.start == 0 and local.numel() == math.prod(self.shape):
            return local.view(self.shape)
        return local.view(-1)[self.start : self.start + math.prod(self.shape)].view(self.shape)


def ranges_of(shards: Sequence[LocalShard], parameters: Iterable[torch.Tensor]) -> list[ParameterRange | None]:
    """Return where each of ``shards`` is among ``parameters``, by the memory they share.

    ``None`` for one that is not there, or holds nothing. Local.
    """
    by_storage: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        if address_of(parameter):
            by_storage.setdefault(local_of(parameter).untyped_storage().data_ptr(), []).append(parameter)
    candidates = [by_storage.get(shard.local.untyped_storage().data_ptr(), []) for shard in shards]
    return [_range_of(shard, those) for shard, those in zip(shards, candidates, strict=True)]


def _range_of(shard: LocalShard, parameters: Sequence[torch.Tensor]) -> ParameterRange | None:
    """Return the range of one of ``parameters``, which are in the same storage."""
    held = shard.local
    for parameter in parameters if held.numel() else ():
        local = local_of(parameter).detach()
        if local.dtype is not held.dtype:
            continue
        start = int(held.storage_offset() - local.storage_offset())
        is_whole = start == 0 and local.numel() == held.numel()
        if is_whole or (start >= 0 and local.is_contiguous() and start + held.numel() <= local.numel()):
            return ParameterRange(parameter, start, shard.geometry.local_shape)
    return None


def gradients_of(shards: Sequence[LocalShard], parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradient of each of ``shards``, of local shape; ``None`` if there is none that is reduced. Local."""
    ranges = ranges_of(shards, parameters)
    return [
        gradient_of(where) if shard.local.numel() else shard.local for shard, where in zip(shards, ranges, strict=True)
    ]


def gradient_of(where: ParameterRange | None) -> torch.Tensor | None:
    """Return the gradient in a range, detached; ``None`` if there is none that is reduced, or it is sparse. Local."""
    gradient = None if where is None else where.parameter.grad
    if where is None or gradient is None or gradient.is_sparse:
        return None
    if isinstance(where.parameter, DTensor) and not is_laid_out_like(gradient, where.parameter):
        return None
    same_size = local_of(gradient).numel() == local_of(where.parameter).numel()
    return where.part_of(gradient) if same_size else None
