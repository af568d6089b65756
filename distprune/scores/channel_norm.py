"""The L_n norm of a channel: the score of ``ln_structured``.

No root is taken: sums of |x|**n have the same order as the norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import final

import torch
from typing_extensions import override

from distprune.scores.base import Elements, Score

Norm = int | float | str


@final
@dataclass(frozen=True)
class ChannelNorm(Score):
    """|x|**n, float64, summed over a channel. Where ``n`` is infinite, the largest or the smallest |x|.

    >>> layer = torch.nn.Linear(8, 4)
    >>> report = prune_model(layer, 0.5, score=ChannelNorm(2), pattern="channels:0")
    >>> int((layer.weight == 0).all(dim=1).sum())
    2

    Raises:
        NotImplementedError: ``n="nuc"``, which needs whole channels in one place.
        ValueError: ``n`` is NaN, or a name other than ``"fro"``.
        TypeError: ``n`` is neither a number nor a name.
    """

    n: Norm
    exponent: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.n == "nuc":
            raise NotImplementedError("n='nuc' needs the singular values of whole channels; use a number or 'fro'")
        if isinstance(self.n, str) and self.n != "fro":
            raise ValueError(f"n={self.n!r} is no norm; use a number, inf, -inf or 'fro'")
        if isinstance(self.n, bool) or not isinstance(self.n, Real | str):
            raise TypeError(f"n must be a number or 'fro', not {self.n!r}")
        exponent = 2.0 if isinstance(self.n, str) else float(self.n)
        if math.isnan(exponent):
            raise ValueError("n is NaN; use a number, inf, -inf or 'fro'")
        combined_by = ("max" if exponent > 0 else "min") if math.isinf(exponent) else "sum"
        descending = -math.inf < exponent < 0
        of_zero = math.inf if descending else 0.0
        vars(self).update(exponent=exponent, combined_by=combined_by, descending=descending, of_zero=of_zero)

    @override
    def dtype(self, weight: torch.dtype) -> torch.dtype:
        return torch.float64

    @override
    def values(self, elements: Elements) -> torch.Tensor:
        weight = elements.weight
        sizes = weight.to(torch.promote_types(weight.dtype, torch.float64)).abs()  # of complex weights the modulus
        return _power(sizes, 1.0 if math.isinf(self.exponent) else self.exponent)


def _power(sizes: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return sizes**exponent (float64, sizes >= 0) by products and square roots, which every device rounds alike."""
    if exponent == 0:
        return (sizes != 0).to(torch.float64).masked_fill(sizes.isnan(), torch.nan)
    if exponent < 0:
        return _power(sizes, -exponent).reciprocal()
    result: torch.Tensor | None = None
    whole, fraction = int(exponent), exponent % 1
    square, root = sizes, sizes
    while whole or fraction:  # one bit of each, from the point outwards
        if whole & 1:
            result = square if result is None else result * square
        whole >>= 1
        square = square * square if whole else square
        if fraction:
            root, fraction = root.sqrt(), fraction * 2
        if fraction >= 1:
            result, fraction = root if result is None else result * root, fraction - 1
    assert result is not None  # a bit was set
    return result
