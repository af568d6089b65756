"""Random scores: a hash of (seed, parameter, flat index), so that no layout draws other numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from distprune.shards import Geometry, LocalShard, flat_chunk

__all__ = ["Random", "random_channels"]


@dataclass(frozen=True)
class Random:
    """Scores of one local shard, uniform over [0, 2**31) as int32.

    The hash is two rounds of MurmurHash3's 32-bit finalizer (Appleby, public domain) over the flat
    index, keyed by BLAKE2b of the seed and the parameter's name; integer arithmetic, so the bits are
    the same on every device. With ``zeros_first``, weights that are zero score -1.
    """

    shard: LocalShard
    seed: int
    zeros_first: bool = False
    ordered_by: Literal["value"] = "value"
    dtype: torch.dtype = torch.int32
    _keys: tuple[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(f"{self.seed}\0{self.shard.name}".encode(), digest_size=8).digest()
        keys = tuple(int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4))
        object.__setattr__(self, "_keys", keys)

    @property
    def device(self) -> torch.device:
        return self.shard.local.device

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return the values of local elements ``start`` to ``stop``, 1-D."""
        hashed = self._hash(torch.from_numpy(self.shard.geometry.flat_indices(start, stop)))
        return self._settle_zeros(hashed, lambda: flat_chunk(self.shard.local, start, stop))

    def values_at(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return the values at local ``offsets`` (int64), 1-D."""
        hashed = self._hash(torch.from_numpy(self.shard.geometry.flat_indices_at(offsets.cpu().numpy())))
        return self._settle_zeros(hashed, lambda: torch.take(self.shard.local, offsets))

    def _settle_zeros(self, hashed: torch.Tensor, weights: Callable[[], torch.Tensor]) -> torch.Tensor:
        return hashed.masked_fill_(weights() == 0, -1) if self.zeros_first else hashed

    def _hash(self, flat: torch.Tensor) -> torch.Tensor:
        flat = flat.to(self.device)
        hashed = flat.to(torch.int32)  # the low 32 bits
        hashed ^= self._keys[0]
        _mix(hashed)
        if self.shard.geometry.global_numel > 1 << 32:
            hashed += (flat >> 32).to(torch.int32) * -0x61C88647  # 2**32 / golden ratio, as in xxHash
        hashed += self._keys[1]
        _mix(hashed)
        return hashed.bitwise_and_(0x7FFFFFFF)


def random_channels(name: str, num_channels: int, seed: int) -> torch.Tensor:
    """Return the scores of a parameter's channels, int32 on the CPU: those of a vector of that name."""
    vector = LocalShard(name, torch.empty(num_channels), Geometry.whole((num_channels,)))
    return Random(vector, seed).values(0, num_channels)


def _mix(hashed: torch.Tensor) -> None:
    """fmix32 in place. int32 products wrap; a masked arithmetic shift is a logical one."""
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed *= -0x7A143595  # 0x85EBCA6B
    hashed ^= (hashed >> 13) & 0x7FFFF
    hashed *= -0x3D4D51CB  # 0xC2B2AE35
    hashed ^= (hashed >> 16) & 0xFFFF
