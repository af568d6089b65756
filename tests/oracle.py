"""The single-process answer, written plainly: sort everything, prune the first k."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["keep_highest", "random_scores"]

_MASK32 = 0xFFFFFFFF


def keep_highest(scores: Sequence[torch.Tensor], eligible: Sequence[torch.Tensor], k: int) -> list[torch.Tensor]:
    """Return masks (True = keep) that drop the ``k`` lowest eligible scores over all tensors; ties by position."""
    flat = [float(value) for tensor in scores for value in tensor.flatten().double()]
    competes = [bool(value) for tensor in eligible for value in tensor.flatten()]
    order = sorted((i for i in range(len(flat)) if competes[i]), key=lambda i: (flat[i], i))
    keep = torch.tensor(competes, dtype=torch.bool)
    keep[order[:k]] = False
    return [part.view(t.shape) for part, t in zip(torch.split(keep, [t.numel() for t in scores]), scores, strict=True)]


def random_scores(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return the hash scores of a whole parameter, in Python integers."""
    import hashlib
    import math

    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    keys = [int.from_bytes(digest[i : i + 4], "little") for i in (0, 4)]
    values = []
    for index in range(math.prod(shape)):
        mixed = _finalize((index & _MASK32) ^ keys[0])
        values.append(_finalize((mixed + keys[1]) & _MASK32) & 0x7FFFFFFF)
    return torch.tensor(values, dtype=torch.int64).view(tuple(shape))


def _finalize(h: int) -> int:
    h ^= h >> 16
    h = h * 0x85EBCA6B & _MASK32
    h ^= h >> 13
    h = h * 0xC2B2AE35 & _MASK32
    return h ^ h >> 16
