"""The single-process answer for patterns, written plainly: group by group, row by row, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import cast

import torch

from distprune import Block, Channels, NByM, PerRow, Unstructured
from distprune.patterns.base import Pattern
from tests.oracle import keep_highest, random_scores

__all__ = ["SEED", "keep_in_pattern"]

SEED = 17


def keep_in_pattern(
    pattern: Pattern,
    names: Sequence[str],
    values: Sequence[torch.Tensor],
    left: Sequence[torch.Tensor],
    *,
    method: str = "magnitude",
    zeros: str = "out",
) -> list[torch.Tensor]:
    """Return masks (True = keep) of matrices (rows, inputs); ``left``: what was not pruned before."""
    scores = [
        value.abs().double() if method == "magnitude" else random_scores(name, value.shape, SEED)
        for name, value in zip(names, values, strict=True)
    ]
    if isinstance(pattern, Unstructured | Block | Channels):
        indices = range(len(names))
        each = [list(indices)] if pattern.scope == "global" else [[i] for i in indices]
        keep: list[torch.Tensor] = []
        for some in each:  # that compete
            of_some = [scores[i] for i in some], [left[i] for i in some]
            if isinstance(pattern, Block):
                keep += _blocks(pattern, [names[i] for i in some], *of_some, method, zeros)
            elif isinstance(pattern, Channels):
                keep += _channels(pattern, [names[i] for i in some], *of_some, method)
            else:
                keep += _elements(cast(float, pattern.sparsity), *of_some, zeros)
        return keep
    return [_rows(pattern, score, of, zeros) for score, of in zip(scores, left, strict=True)]


def _rows(pattern: Pattern, scores: torch.Tensor, left: torch.Tensor, zeros: str) -> torch.Tensor:
    keep = torch.ones_like(left)
    for row in range(len(scores)):
        length = pattern.m if isinstance(pattern, NByM) else scores.shape[1]
        for first in range(0, scores.shape[1], length):
            unit = range(first, first + length)
            order = sorted(unit, key=lambda i: (bool(left[row, i]), float(scores[row, i]), i))
            if isinstance(pattern, NByM):
                num_pruned = pattern.m - pattern.n
            else:
                assert isinstance(pattern, PerRow)
                assert isinstance(pattern.sparsity, float)
                num_before = int((~left[row]).sum()) if zeros == "out" else 0
                num_pruned = num_before + round(pattern.sparsity * (length - num_before))
            keep[row, order[:num_pruned]] = False
    return keep


def _elements(
    amount: float, scores: Sequence[torch.Tensor], left: Sequence[torch.Tensor], zeros: str
) -> list[torch.Tensor]:
    ranked = [score.double().where(of, -1.0) for score, of in zip(scores, left, strict=True)]
    competing = [of if zeros == "out" else torch.ones_like(of) for of in left]
    return keep_highest(ranked, competing, round(amount * sum(int(of.sum()) for of in competing)))


def _blocks(
    pattern: Block,
    names: Sequence[str],
    scores: Sequence[torch.Tensor],
    left: Sequence[torch.Tensor],
    method: str,
    zeros: str,
) -> list[torch.Tensor]:
    size = pattern.size
    ranked = []
    for i, (name, score, of) in enumerate(zip(names, scores, left, strict=True)):
        num_across = score.shape[1] // size
        num_blocks = score.shape[0] // size * num_across
        hashes = random_scores(name, (num_blocks,), SEED)
        for number in range(num_blocks):
            row, column = number // num_across * size, number % num_across * size
            here = of[row : row + size, column : column + size]
            if zeros == "out" and not here.any():
                continue
            sums = _sum(score[row : row + size, column : column + size][here].tolist())
            value = sums if method == "magnitude" else int(hashes[number])
            ranked.append((bool(here.any()), value, i, number, row, column))
    keep = [torch.ones_like(of) for of in left]
    for _, _, i, _, row, column in sorted(ranked)[: round(cast(float, pattern.sparsity) * len(ranked))]:
        keep[i][row : row + size, column : column + size] = False
    return keep


def _channels(
    pattern: Channels, names: Sequence[str], scores: Sequence[torch.Tensor], left: Sequence[torch.Tensor], method: str
) -> list[torch.Tensor]:
    ranked = []
    for i, (name, score, of) in enumerate(zip(names, scores, left, strict=True)):
        hashes = random_scores(name, (score.shape[pattern.dim],), SEED)
        for number in range(score.shape[pattern.dim]):
            here, values = of.select(pattern.dim, number), score.select(pattern.dim, number)
            value = _sum(values[here].tolist()) if method == "magnitude" else int(hashes[number])
            ranked.append((bool(here.any()), value, i, number))
    keep = [torch.ones_like(of) for of in left]
    for _, _, i, number in sorted(ranked)[: round(cast(float, pattern.sparsity) * len(ranked))]:
        keep[i].select(pattern.dim, number).fill_(False)
    return keep


def _sum(addends: Sequence[float]) -> float | Fraction:
    return float("inf") if float("inf") in addends else sum((Fraction(addend) for addend in addends), Fraction(0))
