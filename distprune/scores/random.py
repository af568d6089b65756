"""Random scores: a hash of (seed, parameter, flat index), the same in every layout."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import torch
from typing_extensions import override

from distprune.scores.base import Elements, Evidence, Score
from distprune.shards.device import on_host
from distprune.shards.local_shard import LocalShard

_FACTORS = -0x61C88647, 0x21F0AAAD, -0x2CA5D269  # 0x9E3779B9 of what is above 32 bits; the last: 0xD35A2D97


@final
@dataclass(frozen=True)
class Random(Score):
    """Uniform over [0, 2**31), int32. ``seed=None``: the one that the call is given.

    >>> layer = torch.nn.Linear(8, 4)
    >>> prune_model(layer, 0.5, score=Random(7)).seed  # or score="random", seed=7
    7

    Parameters of one name and shape get the same scores from one seed.

    The hash is a finalizer found with Wellons' hash-prospector (public domain), of the flat index, with a word of
    BLAKE2b of the seed and the parameter's name before each of its two factors: integer arithmetic modulo 2**32, the
    same on every device.
    """

    kernel = "random"
    scores_units = True

    seed: int | None = None

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        dtype = torch.int32 if elements.shard.geometry.global_numel <= 1 << 31 else torch.int64
        return _mixed(elements.flat_indices(dtype), *self.seeds(elements.shard.name))

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        return torch.int32

    @override
    def of_units(self, name: str, units: torch.Tensor) -> torch.Tensor:
        return _mixed(units if units.dtype is torch.int64 else units.clone(), *self.seeds(name))

    @override
    def seeds(self, name: str) -> tuple[int, int]:
        return _seeds(self.seed, name)

    @property
    @override
    def needs_seed(self) -> bool:
        return self.seed is None

    @override
    def seeded(self, seed: int) -> Random:
        return Random(seed)

    @override
    def reads(self, shard: LocalShard, evidence: Evidence) -> list[torch.Tensor]:
        return []


@lru_cache(1 << 14)
def _seeds(seed: int | None, name: str) -> tuple[int, int]:
    first, second = struct.unpack("<ii", hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest())
    return first, second


def _mixed(flat: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Return the hashes of ``flat``, int32: in its memory, or, of int64, new."""
    if flat.dtype is torch.int64:
        low, high = flat.contiguous().view(torch.int32).view(-1, 2).unbind(1)
        flat = low.add(high, alpha=_FACTORS[0])  # all wraps
    mixed: Any = flat.numpy() if on_host(flat.device) else flat
    mixed += first
    _fold(mixed, 16)
    mixed *= _FACTORS[1]
    _fold(mixed, 15)
    mixed += second
    mixed *= _FACTORS[2]
    _fold(mixed, 15)
    mixed &= 0x7FFFFFFF
    return flat


def _fold(mixed: Any, shift: int) -> None:
    """Do ``mixed ^= mixed >> shift``, of unsigned numbers, in place."""
    part = mixed >> shift
    part &= (1 << 32 - shift) - 1
    mixed ^= part
