"""Which elements compete: what is already pruned is out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from distprune.shards import flat_chunk

__all__ = ["Eligible", "NonZero"]


class Eligible(Protocol):
    """Says of local elements (bool, 1-D, on the shard's device) whether they compete."""

    def values(self, start: int, stop: int) -> torch.Tensor: ...
    def values_at(self, offsets: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class NonZero:
    """Elements of ``local`` that are not exactly zero: a mask, or weights that were pruned in place."""

    local: torch.Tensor

    def values(self, start: int, stop: int) -> torch.Tensor:
        return flat_chunk(self.local, start, stop) != 0

    def values_at(self, offsets: torch.Tensor) -> torch.Tensor:
        return torch.take(self.local, offsets) != 0
