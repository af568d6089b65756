"""Units of one reader: which stay, and the weights of what reads them, refitted.

With A = X^T X of the inputs of W, K those that stay and P those that go, W_K <- W_K + W_P A_PK (A_KK + lambda D)^-1:
the least squares fit to what W put out before, D the diagonal of A. Where W has a bias A is taken about the mean, and
the bias takes up what the mean loses. All of it is arithmetic of one rank, the input's owner, but for the rows of W,
which each rank changes where they lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from distprune.calibration.moments import Moments, MomentsOf
from distprune.models.linear_layers import LinearLayer
from distprune.models.units import Units
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Pruning, Solved, Solver
from distprune.patterns.base import Pattern
from distprune.removal.criteria import Criterion, UnitEvidence, damped_cholesky

Refit = Literal["least_squares", "block", "bias", "none"]  # "block": least squares, then each block as a whole
DAMPING = 0.1  # of X^T X, of its diagonal
_NUM_STEPS = 16  # in which units go, by criteria that are rescored
_CHUNK = 1 << 20  # weights that are refitted at a time


@dataclass
class Asked:
    """What is asked of one reader: ``num_kept`` of ``units`` of block ``block`` stay.

    ``norms`` (num_units,) and ``gradients`` (out,) are found later, where the criterion needs them.
    """

    block: str
    units: Units
    num_kept: int
    linear: LinearLayer
    norms: torch.Tensor | None = None
    gradients: torch.Tensor | None = None

    @property
    def features(self) -> torch.Tensor:
        """(num_units, width): the inputs that each unit owns."""
        assert self.units.reader_index is not None  # else there is no reader
        return self.units.reader_index


@dataclass(frozen=True)
class Fitted:
    """``stays`` (in,), bool; ``coefficients`` (gone, kept), by which columns that stay make up for those that go;
    ``lost`` (gone, gone), of which the error is; ``means`` (gone,), what the bias gains. float32.
    """

    stays: torch.Tensor
    coefficients: torch.Tensor
    lost: torch.Tensor
    means: torch.Tensor


@dataclass(frozen=True)
class UnitRemover(Solver[Fitted]):
    """Removes units of the readers ``asked``, by their names in the model, and keeps in mind what it did.

    ``kept`` are the units that stay, by reader, on its owner alone; ``offsets``, by the linear layer's name in the
    block, rows of this rank and what their biases gain.
    """

    needs: ClassVar[MomentsOf] = "pairs"
    sends: ClassVar[bool] = True
    needs_gram: ClassVar[bool] = True
    asked: Mapping[str, Asked]
    prefix: str  # the block's name and a dot
    criterion: Criterion
    refit: Refit
    kept: dict[str, list[int]] = field(default_factory=dict)
    offsets: dict[str, tuple[Rows, torch.Tensor]] = field(default_factory=dict)

    def shifts_bias(self, asked: Asked) -> bool:
        """Return whether the reader's bias takes up the mean of what goes."""
        return asked.linear.bias is not None and self.refit != "none"

    @override
    def weighed(self, rows: Rows) -> torch.Tensor:
        gradients = self.asked[rows.name].gradients
        if gradients is None or not rows.weight.numel():
            return rows.weight
        own = torch.cat([gradients[start:stop] for start, stop in rows.runs]).to(rows.weight.device)
        return rows.weight.float() * own.sqrt()[:, None]

    @override
    def prepare(self, moments: Moments) -> Fitted:
        name = f"{self.prefix}{moments.names[0]}"
        asked = self.asked[name]
        evidence = _evidence(name, asked, moments, centered=self.shifts_bias(asked))
        leaving = _lowest_units(asked, evidence, self.criterion)
        self.kept[name] = (~leaving).nonzero()[:, 0].tolist()
        stays = torch.ones(len(evidence.products), dtype=torch.bool, device=leaving.device)
        stays[evidence.features[leaving].flatten()] = False
        own, other = stays.nonzero()[:, 0], (~stays).nonzero()[:, 0]
        a = evidence.products
        between, of_other = a[other[:, None], own], a[other[:, None], other]
        coefficients = torch.zeros_like(between)  # (gone, kept)
        if self.refit in ("block", "least_squares") and len(other):
            lower = damped_cholesky(a[own[:, None], own], DAMPING, name)
            coefficients = torch.cholesky_solve(between.t(), lower).t()
        lost = of_other - coefficients @ between.t()
        lost += lost.t() - of_other + coefficients @ a[own[:, None], own] @ coefficients.t()
        means = evidence.means[other] - coefficients @ evidence.means[own]
        return Fitted(stays, coefficients.float(), lost.float(), means.float())

    @override
    def sent_like(self, rows: Rows) -> Fitted:
        asked = self.asked[rows.name]
        num_gone = (asked.units.num_units - asked.num_kept) * asked.features.shape[1]
        shapes = (num_gone, rows.num_in - num_gone), (num_gone, num_gone), (num_gone,)
        stays = torch.empty(rows.num_in, dtype=torch.bool, device="meta")
        return Fitted(stays, *(torch.empty(shape, dtype=torch.float32, device="meta") for shape in shapes))

    @override
    def begin(self, rows: Mapping[str, Rows], prepared: Fitted, pattern: Pattern) -> Pruning:
        return _Removing(rows, prepared, self)


@dataclass
class _Removing(Pruning):
    """Nothing competes here: :meth:`UnitRemover.prepare` has chosen the units."""

    rows: Mapping[str, Rows]
    fitted: Fitted
    remover: UnitRemover

    @override
    def finish(self) -> dict[str, Solved]:
        fitted, remover, solved = self.fitted, self.remover, dict[str, Solved]()
        own, other = fitted.stays.nonzero()[:, 0], (~fitted.stays).nonzero()[:, 0]
        for name, of in self.rows.items():
            error, offsets = 0.0, []
            for weight in torch.split(of.weight, max(1, _CHUNK // max(of.num_in, 1))) if of.weight.numel() else ():
                gone, before = weight[:, other].float(), weight[:, own]
                change = (gone @ fitted.coefficients).masked_fill_(before == 0, 0)  # what was pruned stays so
                weight[:, own] = (before + change).to(weight.dtype)
                weight[:, other] = 0
                error += float((gone @ fitted.lost).mul_(gone).sum(dtype=torch.float64))
                offsets.append(gone @ fitted.means)
            if remover.shifts_bias(remover.asked[of.name]):
                nothing = torch.empty(0, dtype=torch.float32, device=of.weight.device)
                remover.offsets[name] = of, torch.cat([nothing, *offsets])
            solved[name] = Solved(len(other) * len(of.weight), max(error, 0.0), DAMPING)
        return solved


def _evidence(name: str, asked: Asked, moments: Moments, *, centered: bool) -> UnitEvidence:
    assert moments.sums is not None
    assert moments.gram is not None  # both were asked for
    num, device = max(moments.num_tokens, 1), moments.values.device
    means, mean_sizes, variances = (moments.sums / num).unbind(1)
    mean_squares = moments.square_sums.double() / num
    products = (moments.centered if centered else moments.values).double()  # type: ignore[union-attr]
    if not moments.num_tokens:  # an expert that nothing was routed to: as if its inputs were white
        products = torch.eye(len(products), dtype=torch.float64, device=device)
        mean_squares = torch.ones_like(mean_squares)
    norms = None if asked.norms is None else asked.norms.to(device)
    features = asked.features.to(device)
    of_features = means, mean_squares, mean_sizes, variances
    return UnitEvidence(features, products, moments.gram, *of_features, norms, DAMPING, name)


def _lowest_units(asked: Asked, evidence: UnitEvidence, criterion: Criterion) -> torch.Tensor:
    """Return which units go, (num_units,) bool; as many of each group. Changes ``evidence``.

    Raises:
        ValueError: scores are NaN, or not one for each unit.
    """
    units, name = asked.units, evidence.name
    size = units.num_units // units.num_groups  # of a group
    left = [(units.num_units - asked.num_kept) // units.num_groups] * units.num_groups  # to go, by group
    num_asked = math.ceil(sum(left) / _NUM_STEPS) if criterion.rescored else sum(left)
    while any(left):
        scores = criterion.scores(evidence)
        if not isinstance(scores, torch.Tensor) or scores.shape != (units.num_units,):
            raise ValueError(f"criterion {criterion.name!r} returned no {units.num_units} scores of {name!r}")
        if bool(scores[evidence.alive].isnan().any()):
            raise ValueError(f"scores of {units.kind} are NaN at {name!r}; mend the weights or statistics first")
        alive, chosen = evidence.alive.tolist(), list[int]()
        for unit in torch.sort(scores, stable=True).indices.tolist():
            if alive[unit] and left[unit // size] and len(chosen) < num_asked:
                left[unit // size] -= 1
                chosen.append(unit)
        if criterion.rescored and any(left):
            evidence.remove(torch.tensor(chosen, dtype=torch.int64, device=scores.device))
        evidence.alive[chosen] = False
    return ~evidence.alive
