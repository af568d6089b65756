"""Random scores: a hash of (seed, parameter, flat index), the same in every layout."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from typing_extensions import override

from distprune.scores.base import Elements, Evidence, Score
from distprune.shards import LocalShard, on_host, sent


@final
@dataclass(frozen=True)
class Random(Score):
    """Uniform over [0, 2**31), int32. ``seed=None``: the first rank draws a seed for each call.

    Parameters of one name and shape get the same scores from one seed.

    The hash is two rounds of MurmurHash3's 32-bit finalizer (Appleby, public domain) over the flat
    index, keyed by BLAKE2b of the seed and the parameter's name; integer arithmetic, so the bits are
    the same on every device.
    """

    scores_units = True

    seed: int | None = None

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        shard = elements.shard
        numel = shard.geometry.global_numel
        return _hash(self._seeds(shard.name), elements.flat_indices(_dtype(numel, shard.local.device)), numel)

    @override
    def joined(self, pieces: Sequence[Elements]) -> torch.Tensor:
        largest, device = max(piece.shard.geometry.global_numel for piece in pieces), pieces[0].shard.local.device
        flat: dict[object, torch.Tensor] = {}  # shards laid out alike share them
        places = []
        for piece in pieces:
            assert isinstance(piece.at, slice)
            key = piece.shard.geometry, piece.at.start, piece.at.stop, piece.at.step
            if key not in flat:
                flat[key] = piece.flat_indices(_dtype(largest, device))
            places.append(flat[key])
        numels = [len(of_piece) for of_piece in places]
        seeds = np.array([self._seeds(piece.shard.name) for piece in pieces], dtype=np.int32)
        if on_host(device):
            first, second = np.repeat(seeds, numels, axis=0).T
        else:
            of = torch.bucketize(
                torch.arange(sum(numels), dtype=torch.int32, device=device),
                sent(torch.from_numpy(np.cumsum(numels, dtype=np.int32)), device),
                right=True,
                out_int32=True,
            )
            first, second = (own.index_select(0, of) for own in sent(torch.from_numpy(seeds.T.copy()), device))
        return _hash((first, second), torch.cat(places), largest)

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        return torch.int32

    @override
    def of_units(self, name: str, units: torch.Tensor) -> torch.Tensor:
        return _hash(self._seeds(name), units, 0)

    def _seeds(self, name: str) -> tuple[int, int]:
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


def _dtype(numel: int, device: torch.device) -> torch.dtype:
    """Return in which dtype flat indices of a parameter of ``numel`` elements are made to be hashed."""
    return torch.int64 if on_host(device) or numel > 1 << 31 else torch.int32


def _hash(seeds: tuple[Any, Any], flat: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the hash of ``flat`` indices; of parameters of 2**32 elements and fewer the high bits are all 0.

    What is int32 is overwritten.
    """
    first, second = seeds
    hashed, mix = _low_bits(flat), _mix if on_host(flat.device) else _mix_there
    hashed ^= first
    mix(hashed)
    if numel > 1 << 32:
        hashed += _low_bits(flat >> 32) * -0x61C88647  # 2**32 / golden ratio, as in xxHash
    hashed += second
    mix(hashed)
    hashed &= 0x7FFFFFFF
    found: torch.Tensor = torch.from_numpy(hashed) if on_host(flat.device) else hashed
    return found


def _low_bits(numbers: torch.Tensor) -> Any:
    """Return the low 32 bits: on the host for numpy, which takes a third of the time that torch does for a few."""
    if on_host(numbers.device):
        return numbers.numpy().astype(np.int32)
    low = numbers.to(torch.int32)
    return low if low.stride() == (1,) else torch.empty(low.shape, dtype=low.dtype, device=low.device).copy_(low)


def _mix(hashed: Any) -> None:
    """fmix32 in place. int32 products wrap; a masked arithmetic shift is a logical one."""
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed *= -0x7A143595  # 0x85EBCA6B
    hashed ^= (hashed >> 13) & 0x7FFFF
    hashed *= -0x3D4D51CB  # 0xC2B2AE35
    hashed ^= (hashed >> 16) & 0xFFFF


def _mix_there(hashed: torch.Tensor) -> None:
    """Do so on an accelerator, which all have the low half of a number first: a third of the bytes are touched."""
    low, high = (hashed.view(torch.int16)[half::2] for half in (0, 1))
    low ^= high
    hashed *= -0x7A143595
    shifted = hashed >> 13
    shifted.view(torch.int16)[1::2].bitwise_and_(0x7)
    hashed ^= shifted
    hashed *= -0x3D4D51CB
    low ^= high
