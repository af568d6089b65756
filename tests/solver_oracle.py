"""What one-shot methods do to one linear layer, written plainly from the papers.

Wanda: arXiv 2306.11695. SparseGPT: arXiv 2301.00774, Algorithm 1. ADMM: arXiv 2401.02938. Shapes:
``out`` and ``in`` are the features of the layer, whose weight is always looked at as (out, in).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

__all__ = ["COLUMNS", "NM", "Pattern", "Squares", "admm", "sparsegpt", "wanda_mask"]

COLUMNS = 128  # of a SparseGPT block, section 3.4 of the paper


@dataclass(frozen=True)
class NM:
    """``n`` of ``m`` consecutive inputs are kept."""

    n: int
    m: int


@dataclass(frozen=True)
class Squares:
    """The fraction ``amount`` of the blocks of ``size`` x ``size`` weights goes (SparseGPT: of each column block's)."""

    size: int
    amount: float


# A fraction competes per row (Wanda, ADMM) or per column block (SparseGPT).
Pattern: TypeAlias = float | NM | Squares


def wanda_mask(weight: torch.Tensor, norms: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Return what stays, bool (out, in); ``norms`` is ||X||_2 per input feature (in,)."""
    scores = weight.abs().float() * norms.float()
    num_out, num_in = weight.shape
    if isinstance(pattern, NM):
        return _keep(scores.reshape(-1, pattern.m), pattern.m - pattern.n).view(num_out, num_in)
    if isinstance(pattern, Squares):
        return _keep_squares(scores, pattern)
    return _keep(scores, round(pattern * num_in))


def _keep(scores: torch.Tensor, num_pruned: int) -> torch.Tensor:
    """Drop the lowest of every row; a stable sort takes equal ones from the lowest index up."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    return keep.scatter(1, scores.sort(dim=1, stable=True).indices[:, :num_pruned], False)


def _keep_squares(scores: torch.Tensor, pattern: Squares) -> torch.Tensor:
    size = pattern.size
    sums = scores.double().reshape(len(scores) // size, size, -1, size).sum((1, 3))
    keep = _keep(sums.reshape(1, -1), round(pattern.amount * sums.numel())).view(sums.shape)
    return keep.repeat_interleave(size, 0).repeat_interleave(size, 1)


def sparsegpt(
    weight: torch.Tensor, hessian: torch.Tensor, pattern: Pattern, *, columns: int = COLUMNS, damping: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the new weight, what stays), both (out, in); ``hessian`` is (in, in), any multiple of X^T X.

    Works in the dtype of ``hessian``.
    """
    w, h = weight.to(hessian.dtype, copy=True, memory_format=torch.contiguous_format), hessian.clone()
    num_in = w.shape[1]
    dead = h.diagonal() == 0
    h.diagonal()[dead] = 1
    w[:, dead] = 0
    h.diagonal().add_(damping * h.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    keep = torch.ones_like(w, dtype=torch.bool)
    for start in range(0, num_in, columns):
        stop = min(start + columns, num_in)
        errors = torch.zeros_like(w[:, start:stop])
        scores = w[:, start:stop] ** 2 / inverse.diagonal()[start:stop] ** 2
        if isinstance(pattern, Squares):
            keep[:, start:stop] = _keep_squares(scores, pattern)
        elif not isinstance(pattern, NM):
            keep[:, start:stop] = _keep(scores.reshape(1, -1), round(pattern * scores.numel())).view(scores.shape)
        for i in range(start, stop):
            if isinstance(pattern, NM) and i % pattern.m == 0:
                group = slice(i, i + pattern.m)
                scores = w[:, group] ** 2 / inverse.diagonal()[group] ** 2
                keep[:, group] = _keep(scores, pattern.m - pattern.n)
            pruned = torch.where(keep[:, i], w[:, i], 0)
            errors[:, i - start] = (w[:, i] - pruned) / inverse[i, i]
            w[:, i] = pruned
            w[:, i + 1 : stop] -= torch.outer(errors[:, i - start], inverse[i, i + 1 : stop])
        w[:, stop:] -= errors @ inverse[start:stop, stop:]
    return w.to(weight.dtype), keep


def admm(
    weight: torch.Tensor,
    products: torch.Tensor,
    pattern: Pattern,
    *,
    damping: float = 0.3,
    penalty: float = 1.0,
    num_steps: int = 8,
    num_closing: int = 6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the new weight, what stays), both (out, in); ``products`` is X^T X. In the dtype of ``products``."""
    num_in = weight.shape[1]
    scale = products.diagonal().sqrt() + 1e-8
    a, eye = products / torch.outer(scale, scale), torch.eye(num_in, dtype=products.dtype)
    w = weight.to(products.dtype) * scale
    inverse = torch.linalg.inv(a + (damping + penalty) * eye)
    unpruned = w @ (a + damping * eye)
    u, z, fitted = torch.zeros_like(w), torch.zeros_like(w), w
    keep = torch.ones_like(w, dtype=torch.bool)
    for step in range(1, num_steps + 1):
        if step <= num_closing:
            sizes = (fitted + u).abs().masked_fill(weight == 0, 0)
            keep = _keep_part(sizes, pattern, 1 - (1 - step / num_closing) ** 3) & (weight != 0)
        z = (fitted + u) * keep
        u = fitted + u - z
        fitted = (unpruned + penalty * (z - u)) @ inverse
    new = (fitted + u) * keep / scale
    new[:, products.diagonal() == 0] = 0
    return new.to(weight.dtype), keep


def _keep_part(sizes: torch.Tensor, pattern: Pattern, share: float) -> torch.Tensor:
    """Drop the smallest ``share`` of what the pattern drops in every row."""
    num_in = sizes.shape[1]
    if isinstance(pattern, Squares):
        return _keep_squares(sizes**2, Squares(pattern.size, share * pattern.amount))
    if isinstance(pattern, NM):
        stays = _keep(sizes.reshape(-1, pattern.m), pattern.m - pattern.n).view(sizes.shape)
        return _keep(sizes.masked_fill(stays, torch.inf), int(share * (num_in // pattern.m * (pattern.m - pattern.n))))
    assert isinstance(pattern, float)
    return _keep(sizes, int(share * round(pattern * num_in)))
