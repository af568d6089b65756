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

from distprune.calibration.moments import Moments, Needs
from distprune.oneshot.rows import Rows, row_parts
from distprune.oneshot.solver import Choose, Solved, Solver
from distprune.patterns.base import Pattern
from distprune.removal.criteria import DAMPING, Criterion, UnitEvidence, damped_cholesky, where_true
from distprune.removal.readers import Asked

Refit = Literal["least_squares", "block", "bias", "none"]  # "block": least squares, then each block as a whole
_NUM_STEPS = 16  # in which units go, by criteria that are rescored


@dataclass(frozen=True)
class UnitRemover(Solver):
    """Removes units of the readers ``asked``, of one block, by their names in the model, and keeps in mind what it did.

    By reader ``kept`` are the units that stay, on its owner alone; ``offsets`` rows of this rank, and what their biases
    gain.
    """

    needs: ClassVar[Needs] = "products"
    needs_gram: ClassVar[bool] = True
    asked: Mapping[str, Asked]
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
        of_rows = torch.cat([gradients[start:stop] for start, stop in rows.runs]).to(rows.weight.device)
        return rows.weight.float() * of_rows.sqrt()[:, None]

    @override
    def prepare(self, moments: Moments) -> dict[str, torch.Tensor]:
        """Return ``stays`` (in,), bool; ``coefficients`` (gone, kept), by which columns that stay make up for those
        that go; ``lost`` (gone, gone), of which the error is; ``means`` (gone,), what the bias gains. float32.
        """
        name, asked = next(item for item in self.asked.items() if item[1].units.reader == moments.names[0])
        evidence = _evidence(name, asked, moments, centered=self.shifts_bias(asked))
        leaving = _lowest_units(asked, evidence, self.criterion)
        self.kept[name] = where_true(~leaving, asked.num_kept).tolist()
        stays = torch.ones(len(evidence.products), dtype=torch.bool, device=leaving.device)
        num_units_gone = asked.units.num_units - asked.num_kept
        stays[evidence.features[where_true(leaving, num_units_gone)].flatten()] = False
        num_gone = num_units_gone * evidence.features.shape[1]
        kept, gone = where_true(stays, len(stays) - num_gone), where_true(~stays, num_gone)
        a = evidence.products
        between, of_gone = a[gone[:, None], kept], a[gone[:, None], gone]
        coefficients = torch.zeros_like(between)  # (gone, kept)
        if self.refit in ("block", "least_squares") and len(gone):
            lower = damped_cholesky(a[kept[:, None], kept], name)
            coefficients = torch.cholesky_solve(between.t(), lower).t()
        lost = of_gone - coefficients @ between.t()
        lost += lost.t() - of_gone + coefficients @ a[kept[:, None], kept] @ coefficients.t()
        means = evidence.means[gone] - coefficients @ evidence.means[kept]
        fitted = {"coefficients": coefficients, "lost": lost, "means": means}
        return {"stays": stays, **{key: values.float() for key, values in fitted.items()}}

    @override
    def solve(self, rows: Mapping[str, Rows], moments: Moments, pattern: Pattern, choose: Choose) -> dict[str, Solved]:
        """Nothing competes here: :meth:`prepare` has chosen the units."""
        fitted, solved = moments.prepared, dict[str, Solved]()
        num_gone, num_kept = fitted["coefficients"].shape
        kept, gone = where_true(fitted["stays"], num_kept), where_true(~fitted["stays"], num_gone)
        for name, of_layer in rows.items():
            error = torch.zeros((), dtype=torch.float64, device=of_layer.weight.device)
            offsets = [fitted["means"][:0]]
            for (weight,) in row_parts(of_layer.weight):
                taken, before = weight[:, gone].float(), weight[:, kept]
                change = (taken @ fitted["coefficients"]).masked_fill_(before == 0, 0)  # what was pruned stays so
                weight[:, kept] = (before + change).to(weight.dtype)
                weight[:, gone] = 0
                error += (taken @ fitted["lost"]).mul_(taken).sum(dtype=torch.float64)
                offsets.append(taken @ fitted["means"])
            if self.shifts_bias(self.asked[of_layer.name]):
                self.offsets[of_layer.name] = of_layer, torch.cat(offsets)
            solved[name] = Solved(fitted["stays"].expand_as(of_layer.weight), DAMPING, error.clamp_(min=0))
        return solved


def _evidence(name: str, asked: Asked, moments: Moments, *, centered: bool) -> UnitEvidence:
    assert moments.products is not None
    assert moments.gram is not None  # both were asked for
    assert asked.units.reader_index is not None  # else there is no reader
    num, means, device = max(moments.num_tokens, 1), moments.mean, moments.mean.device
    mean_squares = moments.squares / num
    return UnitEvidence(
        features=asked.units.reader_index.to(device),  # (num_units, width): the inputs that each unit owns
        products=moments.products - num * torch.outer(means, means) if centered else moments.products,
        gram=moments.gram,
        means=means,
        mean_squares=mean_squares,
        mean_sizes=moments.mean_sizes,
        variances=(mean_squares - means.square()).clamp_(min=0),
        norms=None if asked.norms is None else asked.norms.to(device),
        name=name,
    )


def _lowest_units(asked: Asked, evidence: UnitEvidence, criterion: Criterion) -> torch.Tensor:
    """Return which units go, (num_units,) bool; as many of each group. Changes ``evidence``.

    Raises:
        ValueError: scores are NaN, or not one for each unit.
    """
    units, name, device = asked.units, evidence.name, evidence.alive.device
    num_left = units.num_units - asked.num_kept  # to go
    num_of_group = num_left // units.num_groups
    num_at_once = math.ceil(num_left / _NUM_STEPS) if criterion.rescored else num_left
    any_nan = torch.zeros((), dtype=torch.bool, device=device)
    while num_left:
        scores = criterion.scores(evidence)
        if not isinstance(scores, torch.Tensor) or scores.shape != (units.num_units,):
            raise ValueError(f"criterion {criterion.name!r} returned no {units.num_units} scores of {name!r}")
        any_nan |= (scores.isnan() & evidence.alive).any()
        scores = scores.clamp(max=torch.finfo(scores.dtype).max).masked_fill(~evidence.alive, torch.inf)
        by_group = scores.view(units.num_groups, -1).argsort(dim=1, stable=True).argsort(dim=1)
        num_gone = (~evidence.alive).view(units.num_groups, -1).sum(dim=1, keepdim=True)
        may_go = (by_group < num_of_group - num_gone).flatten() & evidence.alive
        order = torch.argsort(scores, stable=True)
        going = order[where_true(may_go[order], min(num_at_once, num_left))]
        num_left -= len(going)
        evidence.alive[going] = False
        if criterion.rescored and num_left:
            evidence.refit(going)
    if bool(any_nan):
        raise ValueError(f"scores of {units.kind} are NaN at {name!r}; mend the weights or statistics first")
    return ~evidence.alive
