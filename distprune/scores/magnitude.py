"""Magnitude: |w|, the score of `torch.nn.utils.prune.l1_unstructured`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from distprune.shards import LocalShard, flat_chunk

__all__ = ["Magnitude"]


@dataclass(frozen=True)
class Magnitude:
    """Scores of one local shard. The values are the weights themselves, ordered by magnitude."""

    shard: LocalShard
    ordered_by: Literal["magnitude"] = "magnitude"

    @property
    def dtype(self) -> torch.dtype:
        return self.shard.local.dtype

    @property
    def device(self) -> torch.device:
        return self.shard.local.device

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return the values of local elements ``start`` to ``stop``, 1-D; a view where that is possible."""
        return flat_chunk(self.shard.local, start, stop)

    def values_at(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return the values at local ``offsets`` (int64, on the shard's device), 1-D."""
        return torch.take(self.shard.local, offsets)
