"""Awkward weights, and what kernels are to do with them: plain forms, by sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from distprune.collectives.base import Communicator
from distprune.kernels.lowest import BLOCK, Keys, Lowest, Mark
from distprune.kernels.table import Piece, ScoreName, tables_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(WORDS[tensor.itemsize])


def awkward(rng: np.random.Generator, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return weights: dense, of few values, with zeros of both signs, infinities, subnormals, or all equal."""
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    w = torch.randn(numel, generator=generator)
    kind = rng.integers(6)
    if kind == 1:
        w = (w * 2).round() / 2
    elif kind == 2:
        w = w * (torch.rand(numel, generator=generator) < 0.5)  # half are 0.0, or -0.0
    elif kind == 3 and numel:
        w[torch.randint(numel, (numel // 4 + 1,), generator=generator)] = torch.inf
        w[torch.randint(numel, (numel // 4 + 1,), generator=generator)] = -torch.inf
    elif kind == 4:
        w = torch.full((numel,), -1.5)
    elif kind == 5:
        w = w * 10.0 ** rng.integers(-42, 1)
    return w.to(dtype)


def keys_for(score: ScoreName, dtypes: Sequence[torch.dtype], marked: Mark = "zeros") -> Keys:
    wide = score == "magnitude" and len(set(dtypes)) > 1
    last = INFINITY[dtypes[0]] if score == "magnitude" and not wide else 0x7F800000
    gone = 0 if score == "magnitude" and marked == "zeros" else -1
    return Keys(score, gone, 0x7FFFFFFF if score == "random" else last, marked, wide)


def hashed(seeds: tuple[int, int], flat: np.ndarray[tuple[int], np.dtype[np.int64]]) -> torch.Tensor:
    """Return random scores of flat indices, by integers of any size."""
    scores = []
    for i in flat.tolist():
        x = ((i & 0xFFFFFFFF) + (i >> 32) * 0x9E3779B9 + seeds[0]) & 0xFFFFFFFF
        x = ((x ^ x >> 16) * 0x21F0AAAD) & 0xFFFFFFFF
        x = ((x ^ x >> 15) + seeds[1]) & 0xFFFFFFFF
        x = (x * 0xD35A2D97) & 0xFFFFFFFF
        scores.append((x ^ x >> 15) & 0x7FFFFFFF)
    return torch.tensor(scores, dtype=torch.float64)


def lowest(scores: torch.Tensor, gone: torch.Tensor, competitions: object, k: Sequence[int]) -> torch.Tensor:
    """Return which go: all that is gone, and of each competition the k lowest by (score, position)."""
    goes = gone.clone()
    for c in np.unique(np.asarray(competitions)):
        at = np.flatnonzero(np.asarray(competitions) == c)
        key = torch.where(gone[at], -1.0, scores[at].double())
        goes[at[key.sort(stable=True).indices[: k[c]].numpy()]] = True
    return goes


def zeroed(weights: torch.Tensor, goes: torch.Tensor) -> torch.Tensor:
    return torch.where(goes.view_as(weights), torch.zeros((), dtype=weights.dtype), weights)


def prune_pieces(
    comm: Communicator, pieces: Sequence[Piece], num_lowest: Sequence[int], num_positions: Sequence[int], keys: Keys,
    *, writes_mask: bool = False, **tuning: Any,
) -> tuple[torch.Tensor, Lowest]:  # fmt: skip
    """Prune the ``num_lowest`` of each competition in place, or write masks; return the totals, and what was found.

    Every rank must call it, with at least one piece.
    """
    device = pieces[0].values.device
    tables = tables_of(pieces, tuning.get("block", BLOCK))
    lowest = Lowest(comm, device, num_lowest, num_positions, keys, **tuning)
    totals = torch.zeros((1 + max(piece.tensor for piece in pieces), 3), dtype=torch.int64, device=device)
    lowest.sample(tables, in_place=not writes_mask)
    lowest.find(lambda: tables, may_fail=False)
    for table in tables:
        lowest.write(table, totals, writes_mask=writes_mask)
    return totals, lowest
