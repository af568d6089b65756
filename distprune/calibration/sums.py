"""Sums over the tokens of one sample."""

from __future__ import annotations

import torch

_ROWS = 256  # tokens in float64 at a time
_STRIP = 128  # rows of X^T X that are computed together


def square_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of every column of ``x`` (tokens, columns), summed in float64, as float32."""
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    for rows in torch.split(x, _ROWS):
        total += rows.double().square().sum(dim=0)
    return total.float()


def feature_sums(x: torch.Tensor) -> torch.Tensor:
    """Return the sums of every column of ``x`` (tokens, columns), and of its sizes, (columns, 2) float64."""
    total = torch.zeros((x.shape[1], 2), dtype=torch.float64, device=x.device)
    for rows in torch.split(x, _ROWS):
        values = rows.double()
        total += torch.stack([values.sum(dim=0), values.abs().sum(dim=0)], dim=1)
    return total


def in_float32(sums: torch.Tensor) -> torch.Tensor:
    """Return ``sums`` (columns, n), float64, each as two float32 numbers of which it is the sum, (columns, 2 n)."""
    high = sums.float()
    return torch.stack([high, (sums - high).float()], dim=2).flatten(1)


def add_products(total: torch.Tensor, x: torch.Tensor, start: int) -> None:
    """Add to ``total``, rows ``start`` on of X^T X, those of ``x`` (tokens, in), computed in float32.

    Only those on and above the diagonal, and what of the strips' corners is below it: the rest is their mirror image.
    """
    x = x.float()
    for strip in torch.split(total, _STRIP):
        stop = start + len(strip)
        strip[:, start:] += x[:, start:stop].t() @ x[:, start:]
        start = stop
