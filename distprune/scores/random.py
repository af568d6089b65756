"""Random scores: a hash of (seed, parameter, flat index), the same in every layout."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from distprune.scores.base import Elements, Evidence, Score
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
        return self.of_units(elements.shard.name, elements.flat_indices())

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        return torch.int32

    @override
    def of_units(self, name: str, units: torch.Tensor) -> torch.Tensor:
        first, second = self._seeds(name)
        mixed = (units >> 32).to(torch.int32).mul_(_FACTORS[0]).add_(first).add_(units.to(torch.int32))  # all wrap
        _fold(mixed, 16).mul_(_FACTORS[1])
        _fold(mixed, 15).add_(second).mul_(_FACTORS[2])
        return _fold(mixed, 15).bitwise_and_(0x7FFFFFFF)

    def _seeds(self, name: str) -> tuple[int, int]:
        """Return the words of parameter ``name``, int32."""
        digest = hashlib.blake2b(f"{self.seed}\0{name}".encode(), digest_size=8).digest()
        first, second = struct.unpack("<ii", digest)
        return first, second

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


def _fold(mixed: torch.Tensor, shift: int) -> torch.Tensor:
    """Do ``mixed ^= mixed >> shift``, of unsigned numbers, in place."""
    return mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << 32 - shift) - 1))
