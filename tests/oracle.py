"""The single-process answer, written plainly: sort everything, prune the first k."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["keep_highest", "random_scores", "random_scores_at"]

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
    """Return the hash scores of a whole parameter."""
    import math

    return random_scores_at(name, range(math.prod(shape)), seed).view(tuple(shape))


def random_scores_at(name: str, indices: Iterable[int], seed: int) -> torch.Tensor:
    """Return the hash scores at flat indices, in Python integers."""
    import hashlib

    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    first, second = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4))
    values = []
    for index in indices:
        mixed = ((index & _MASK32) + (index >> 32) * 0x9E3779B9 + first) & _MASK32
        mixed = (mixed ^ mixed >> 16) * 0x21F0AAAD & _MASK32
        mixed = ((mixed ^ mixed >> 15) + second) * 0xD35A2D97 & _MASK32
        values.append((mixed ^ mixed >> 15) & 0x7FFFFFFF)
    return torch.tensor(values, dtype=torch.int64)
