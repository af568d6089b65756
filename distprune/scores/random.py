"""Random scores: a hash of (seed, parameter, flat index), the same in every layout."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from typing_extensions import override

from distprune.scores.base import Elements, Evidence, Score
from distprune.scores.digit_hash import hash_at, hash_joined, hash_run
from distprune.shards.device import on_host
from distprune.shards.local_shard import LocalShard


@final
@dataclass(frozen=True)
class Random(Score):
    """Uniform over [0, 2**31), int32. ``seed=None``: the one that the call is given.

    >>> layer = torch.nn.Linear(8, 4)
    >>> prune_model(layer, 0.5, score=Random(7)).seed  # or score="random", seed=7
    7

    Parameters of one name and shape get the same scores from one seed.

    The hash is that of ``digit_hash.py``, keyed by BLAKE2b of the seed and the parameter's name; integer arithmetic,
    so the bits are the same on every device.
    """

    scores_units = True

    seed: int | None = None

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        shard, seeds = elements.shard, self._seeds(elements.shard.name)
        if isinstance(elements.at, slice) and elements.at.step is None and shard.geometry.flat_start is not None:
            return hash_run(seeds, *_span(elements), shard.local.device)
        numel = shard.geometry.global_numel
        return hash_at(seeds, elements.flat_indices(_dtype(numel, shard.local.device)), numel)

    @override
    def joined(self, pieces: Sequence[Elements]) -> torch.Tensor:
        seeds = [self._seeds(piece.shard.name) for piece in pieces]
        spans = [_span(piece) for piece in pieces]
        dtype = _dtype(max(stop for _, stop in spans), pieces[0].shard.local.device)
        flat: dict[object, torch.Tensor] = {}  # shards laid out alike share them
        places = []
        for piece in pieces:
            assert isinstance(piece.at, slice)
            key = piece.shard.geometry, piece.at.start, piece.at.stop, piece.at.step
            if key not in flat:
                flat[key] = piece.flat_indices(dtype)
            places.append(flat[key])
        return hash_joined(seeds, places, spans)

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        return torch.int32

    @override
    def of_units(self, name: str, units: torch.Tensor) -> torch.Tensor:
        return hash_at(self._seeds(name), units, int(units.max()) + 1 if len(units) else 0)

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


def _span(elements: Elements) -> tuple[int, int]:
    """Return between which flat indices ``elements`` lie."""
    geometry, at = elements.shard.geometry, elements.at
    if isinstance(at, slice) and geometry.flat_start is not None:
        return geometry.flat_start + at.start, geometry.flat_start + at.stop
    return 0, geometry.global_numel
