"""What is known of the units of one reader, on the rank that chooses among them. Arithmetic is float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from distprune.oneshot.damping import damped_factor

__all__ = ["UnitEvidence", "damped_cholesky"]

_LEAST = 1e-9  # of the mean diagonal, for an input that is always 0


@dataclass
class UnitEvidence:
    """Of the units of a linear layer W (out, in) that reads them. A criterion may look at all of it.

    ``features`` (num_units, width) are the inputs of W that each unit owns. ``products`` (in, in) is X^T X of what W is
    given, over all tokens, about their mean where W has a bias, which takes that up. ``gram`` (in, in) is W^T W, or
    W^T R W with R the squared gradients of the outputs, for criteria that need ``"gradients"``. ``means``,
    ``mean_squares`` and ``mean_sizes`` (in,) are of x, x^2 and |x|. ``norms`` (num_units,) are sums of squares of all
    weights that leave with a unit, for criteria that need ``"norms"``. ``alive`` (num_units,): units not gone yet.
    """

    features: torch.Tensor
    products: torch.Tensor
    gram: torch.Tensor
    means: torch.Tensor
    mean_squares: torch.Tensor
    mean_sizes: torch.Tensor
    norms: torch.Tensor | None
    damping: float
    name: str  # of W
    alive: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.alive = torch.ones(len(self.features), dtype=torch.bool, device=self.features.device)

    @cached_property
    def inverse(self) -> torch.Tensor:
        """The inverse of X^T X, damped."""
        return torch.cholesky_inverse(damped_cholesky(self.products, self.damping, self.name))

    def of_units(self, of_features: torch.Tensor) -> torch.Tensor:
        """Return the sums by unit of what is known of each input, (in,)."""
        return of_features[self.features].sum(dim=1)

    def remove(self, units: torch.Tensor) -> None:
        """Go on as if ``units`` (int64) had gone and W had been refitted: W <- W - W_P [A^-1]_PP^-1 [A^-1]_P:."""
        gone = self.features[units].flatten()
        change = torch.linalg.solve(self.inverse[gone[:, None], gone], self.inverse[gone])  # (gone, in)
        self.inverse.sub_(self.inverse[:, gone] @ change)
        half = self.gram[:, gone] - change.t() @ (self.gram[gone[:, None], gone] / 2)
        both = half @ change
        self.gram.sub_(both).sub_(both.t())
        self.alive[units] = False


def damped_cholesky(products: torch.Tensor, damping: float, name: str) -> torch.Tensor:
    """Return the Cholesky factor of ``products``, of the inputs of ``name``, damped by a share of their diagonal."""
    diagonal = products.diagonal()
    least = _LEAST * float(diagonal.mean()) or 1.0
    return damped_factor(products.clone(), torch.where(diagonal > 0, damping * diagonal, least), name)[0]
