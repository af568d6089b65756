"""How much each unit of a reader matters: a criterion is one small class.

One of one's own says what it :attr:`~Criterion.needs` and returns a score for each unit; it then works for every kind
of unit, in every layout and on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from distprune.oneshot.damping import damped_factor

DAMPING = 0.1  # of X^T X, of its diagonal
_LEAST = 1e-9  # of the mean diagonal, for an input that is always 0


@dataclass
class UnitEvidence:
    """Of the units of a linear layer W (out, in) that reads them. A criterion may look at all of it.

    ``features`` (num_units, width) are the inputs of W that each unit owns. ``products`` (in, in) is X^T X of what W is
    given, over all tokens, about their mean where W has a bias, which takes that up. ``gram`` (in, in) is W^T W, or
    W^T R W with R the squared gradients of the outputs, for criteria that need ``"gradients"``. ``means``,
    ``mean_squares`` and ``mean_sizes`` (in,) are of x, x^2 and |x|, ``variances`` of x^2 about the mean. ``norms``
    (num_units,) are sums of squares of all weights that leave with a unit, for criteria that need ``"norms"``.
    ``alive`` (num_units,): units not gone yet.
    """

    features: torch.Tensor
    products: torch.Tensor
    gram: torch.Tensor
    means: torch.Tensor
    mean_squares: torch.Tensor
    mean_sizes: torch.Tensor
    variances: torch.Tensor
    norms: torch.Tensor | None
    name: str  # of W
    alive: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.alive = torch.ones(len(self.features), dtype=torch.bool, device=self.features.device)

    @cached_property
    def inverse(self) -> torch.Tensor:
        """The inverse of X^T X, damped."""
        return torch.cholesky_inverse(damped_cholesky(self.products, self.name))

    def of_units(self, of_features: torch.Tensor) -> torch.Tensor:
        """Return the sums by unit of what is known of each input, (in,)."""
        return of_features[self.features].sum(dim=1)

    def refit(self, units: torch.Tensor) -> None:
        """Go on as if W had been refitted without ``units`` (int64): W <- W - W_P [A^-1]_PP^-1 [A^-1]_P:."""
        gone = self.features[units].flatten()
        change = solved(self.inverse[gone[:, None], gone], self.inverse[gone])  # (gone, in)
        self.inverse.sub_(self.inverse[:, gone] @ change)
        half = self.gram[:, gone] - change.t() @ (self.gram[gone[:, None], gone] / 2)
        both = half @ change
        self.gram.sub_(both).sub_(both.t())


def solved(matrices: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the solutions; of a singular matrix what is not finite, so that no device is waited for."""
    solutions: torch.Tensor = torch.linalg.solve_ex(matrices, right).result
    return solutions


def where_true(flags: torch.Tensor, num: int) -> torch.Tensor:
    """Return the ``num`` places where ``flags`` (bool) is True, ascending; a device is not waited for."""
    return torch.argsort(flags.to(torch.int8), descending=True, stable=True)[:num]


def damped_cholesky(products: torch.Tensor, name: str) -> torch.Tensor:
    """Return the Cholesky factor of ``products``, of the inputs of ``name``, damped by a share of their diagonal."""
    diagonal = products.diagonal()
    least = _LEAST * diagonal.mean()
    least = torch.where(least > 0, least, 1.0)
    return damped_factor(products.clone(), torch.where(diagonal > 0, DAMPING * diagonal, least), name)[0]


CriterionName = Literal["obs", "taylor", "fluctuation", "activation", "magnitude"]
Need = Literal["norms", "gradients"]


class Criterion(ABC):
    """The units with the lowest scores go, of equal ones those with the lowest indices first.

    >>> class Energy(Criterion):
    ...     def scores(self, evidence):
    ...         return evidence.of_units(evidence.mean_squares)
    """

    needs: ClassVar[tuple[Need, ...]] = ()
    rescored: ClassVar[bool] = False  # units go in steps, and those left are scored again after each

    @property
    def name(self) -> str:
        """What reports call it."""
        return type(self).__name__.lower().removeprefix("unit")

    @abstractmethod
    def scores(self, evidence: UnitEvidence) -> torch.Tensor:
        """Return one score for each unit, (num_units,) float64, higher = keep; of units that have gone any. Local."""


class OBS(Criterion):
    """What the outputs lose if a unit goes and W is refitted: tr(W_j [A^-1]_jj^-1 W_j^T), A = X^T X.

    Optimal Brain Surgeon (Hassibi and Stork, 1992) for units, as in ZipLM (arXiv 2302.04089).
    """

    rescored: ClassVar[bool] = True

    @override
    def scores(self, evidence: UnitEvidence) -> torch.Tensor:
        rows, columns = evidence.features[:, :, None], evidence.features[:, None, :]
        losses = solved(evidence.inverse[rows, columns], evidence.gram[rows, columns])
        return losses.diagonal(dim1=1, dim2=2).sum(dim=1)


class UnitTaylor(Criterion):
    """What the loss feels of a unit that goes, to second order: the sum of r_i W_ij^2 A_jj.

    r_i are the squared gradients of the outputs (LeCun et al., 1989; Molchanov et al., arXiv 1906.10771).
    """

    needs: ClassVar[tuple[Need, ...]] = ("gradients",)

    @override
    def scores(self, evidence: UnitEvidence) -> torch.Tensor:
        return evidence.of_units(evidence.gram.diagonal() * evidence.mean_squares)


class Fluctuation(Criterion):
    """How much what a unit adds varies over tokens: the variance of x_j times ||W_j||^2 (FLAP, arXiv 2312.11983)."""

    @override
    def scores(self, evidence: UnitEvidence) -> torch.Tensor:
        return evidence.of_units(evidence.variances * evidence.gram.diagonal())


class Activation(Criterion):
    """The mean of |x_j| (Minitron, arXiv 2407.14679)."""

    @override
    def scores(self, evidence: UnitEvidence) -> torch.Tensor:
        return evidence.of_units(evidence.mean_sizes)


class UnitMagnitude(Criterion):
    """The sum of squares of all weights that leave with a unit."""

    needs: ClassVar[tuple[Need, ...]] = ("norms",)

    @override
    def scores(self, evidence: UnitEvidence) -> torch.Tensor:
        assert evidence.norms is not None
        return evidence.norms


def criterion_of(name: CriterionName | Criterion) -> Criterion:
    """Return the criterion called ``name``, or the one that is given.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(name, Criterion):
        return name
    known = {one.name: one for one in (OBS(), UnitTaylor(), Fluctuation(), Activation(), UnitMagnitude())}
    if name not in known:
        raise ValueError(f"criterion={name!r} is none of {', '.join(known)}, or a Criterion")
    return known[name]
