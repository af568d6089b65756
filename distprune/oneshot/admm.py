"""ADMM with a mask that closes step by step: Boža, arXiv 2401.02938, section 3 and Algorithm 1.

The weights that stay are refitted by least squares while the mask grows to what the pattern asks for. Rows are
independent once the inverse for their inputs is there: ranks do not talk while a layer is solved.

Shapes: W is (rows, in). S holds the norm of each input, (in,); A = S^-1 X^T X S^-1 has ones on its diagonal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch
from typing_extensions import override

from distprune.calibration.moments import Moments, MomentsOf
from distprune.calibration.triangle import pack_triangle, unpack_triangle
from distprune.oneshot.damping import DAMPING, damped_factor
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Computed, Pruning, Solved, Solver, Stage, as_keys
from distprune.patterns.base import Pattern
from distprune.scores.base import LocalScores, Score, local_scores
from distprune.selection.highest import keep_highest_per_row
from distprune.shards.device import on_host

PENALTY = 1.0  # rho
NUM_STEPS, NUM_CLOSING = 8, 6  # the mask moves in the first ones, and is complete after them
_SMALLEST_NORM = 1e-8
CHUNK = 1 << 20  # weights that are solved at a time; some ten such matrices are in memory


@dataclass(frozen=True)
class ADMM(Solver["_Inputs"]):
    """Refits the weights that stay while the mask closes, row by row (arXiv 2401.02938).

    >>> prune_blocks(llama, samples, 0.5, method=ADMM(damping=0.05)).sparsity
    0.5

    ``damping`` is added to the diagonal of A (see ``damped_factor``). Arithmetic is float32; unstructured means of each
    row.

    Blocks of weights compete over all rows, by the sums of V^2, whenever the mask moves. Weights of inputs that were
    always 0 become 0. Zeros go first. The errors are those of X^T X, without the damping.
    """

    needs: ClassVar[MomentsOf] = "pairs"
    sends: ClassVar[bool] = True
    damping: float = DAMPING  # lambda
    score: Score = field(default=Computed(), init=False)

    @override
    def stages(self, num_in: int, pattern: Pattern) -> Sequence[Stage]:
        if pattern.by_row().is_by_row:
            return ()
        if not pattern.width:
            raise NotImplementedError(f"ADMM decides rows, or blocks of weights, which {pattern!r} does not")
        return [Stage(0, num_in, _part_of(pattern, _closed(step))) for step in range(1, NUM_CLOSING + 1)]

    @override
    def prepare(self, moments: Moments) -> _Inputs:
        a, scale, damped = _normalized(moments)
        damped.copy_(a)
        lower, num_raised = damped_factor(damped, self.damping, moments.names[0], besides=PENALTY)
        return _Inputs(torch.cholesky_inverse(lower), a, scale, self.damping * 10**num_raised)

    @override
    def sent_like(self, rows: Rows) -> _Inputs:
        square = torch.empty((rows.num_in, rows.num_in), dtype=torch.float32, device="meta")
        return _Inputs(square, square, square[0], self.damping)

    @override
    def pack(self, prepared: _Inputs) -> list[torch.Tensor]:
        return [pack_triangle(prepared.inverse)]

    @override
    def unpack(self, like: _Inputs, packed: Sequence[torch.Tensor], moments: Moments) -> _Inputs:
        a, scale, _ = _normalized(moments)
        inverse = unpack_triangle(packed[0]).t()  # by columns, as the owner's lies: so products round alike
        return _Inputs(inverse, a, scale, like.damping)

    @override
    def begin(self, rows: Mapping[str, Rows], prepared: _Inputs, pattern: Pattern) -> Pruning:
        if pattern.by_row().is_by_row:
            return _ByRow(rows, prepared, pattern.by_row())
        return _OverAllRows(rows, prepared, self.score)


@dataclass(frozen=True)
class _Inputs:
    """``inverse`` is (A + (lambda + rho) I)^-1, (in, in), as ``a``; both symmetric. ``scale`` (in,) is S.

    ``damping`` is lambda, on the owner of the inputs as far as it was raised.
    """

    inverse: torch.Tensor
    a: torch.Tensor
    scale: torch.Tensor
    damping: float


def _normalized(moments: Moments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return A and S, and memory as large as A; X^T X is overwritten."""
    products = moments.values
    if not moments.num_tokens:  # an expert that nothing was routed to: as if its inputs were white
        products = torch.eye(len(products), dtype=torch.float32, device=products.device)
    scale = products.diagonal().sqrt() + _SMALLEST_NORM
    scales = torch.outer(scale, scale)  # so that both are symmetric to the last bit
    return products.div_(scales), scale, scales


class _Descent:
    """Rows ``weight`` (rows, in) on their way. V is the fitted weights plus what the mask keeps from them."""

    def __init__(self, weight: torch.Tensor, inputs: _Inputs) -> None:
        self._weight, self._inputs = weight, inputs
        self._before = weight.float() * inputs.scale
        # With W_n = W S: W_n (A + lambda I) P = W_n - rho W_n P.
        self._aim = torch.addmm(self._before, self._before, inputs.inverse, alpha=-PENALTY)
        self._v, self._next = self._before.clone(), torch.empty_like(self._before)
        zeros = weight == 0
        self._zeros = zeros if not on_host(zeros.device) or bool(zeros.any()) else None  # what was pruned before
        self._dropped = torch.zeros_like(self._before)  # 1 or 0

    def sizes(self) -> torch.Tensor:
        """Return |V|, 0 where the weight was 0."""
        sizes = self._v.abs()
        return sizes if self._zeros is None else sizes.masked_fill_(self._zeros, 0)

    def step(self, keep: torch.Tensor | None) -> None:
        """Fit the weights once more, to the mask ``keep`` (bool), ``None``: as before."""
        if keep is not None:
            torch.logical_not(keep, out=self._dropped)
            if self._zeros is not None:
                self._dropped.masked_fill_(self._zeros, 1)
        dropped = torch.mul(self._v, self._dropped, out=self._next)
        target = self._v.sub_(dropped, alpha=2)  # V where it stays, -V where it goes
        fitted = dropped.add_(self._aim).addmm_(target, self._inputs.inverse, alpha=PENALTY)
        self._v, self._next = fitted, self._v

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new weights. Return how many the mask prunes, and ||X (W - W')^T||^2."""
        after = self._v.masked_fill_(self._dropped.bool(), 0)
        after.masked_fill_(self._inputs.scale == _SMALLEST_NORM, 0)
        change = self._before - after
        error = (change @ self._inputs.a).mul_(change).sum(dtype=torch.float64)
        self._weight.copy_(after / self._inputs.scale)
        return torch.count_nonzero(self._dropped), error


@dataclass
class _ByRow(Pruning):
    """Every row's mask is its own: chunk after chunk of rows takes all steps."""

    rows: Mapping[str, Rows]
    inputs: _Inputs
    pattern: Pattern

    @override
    def finish(self) -> dict[str, Solved]:
        size, solved = max(1, CHUNK // max(len(self.inputs.scale), 1)), dict[str, Solved]()
        for name, of_layer in self.rows.items():
            own, figures = self.pattern.of(of_layer.name), list[tuple[torch.Tensor, torch.Tensor]]()
            for weight in torch.split(of_layer.weight, size):
                descent = _Descent(weight, self.inputs)
                for step in range(1, NUM_STEPS + 1):
                    descent.step(_keep(descent.sizes(), own, _closed(step)) if step <= NUM_CLOSING else None)
                figures.append(descent.finish())
            num_pruned, error = (sum(of_chunks) for of_chunks in zip(*figures, strict=True))
            solved[name] = Solved(num_pruned, error, self.inputs.damping)
        return solved


class _OverAllRows(Pruning):
    """Blocks of weights compete over all rows: a stage is a step in which the mask moves."""

    def __init__(self, rows: Mapping[str, Rows], inputs: _Inputs, score: Score) -> None:
        self._rows, self._inputs, self._score = rows, inputs, score
        self._descents = {name: _Descent(of_layer.weight, inputs) for name, of_layer in rows.items()}

    @override
    def scores(self, stage: int) -> list[LocalScores]:
        shards = [self._rows[name].shard(of.sizes().square_()) for name, of in self._descents.items()]
        return local_scores(self._score, shards)

    @override
    def apply(self, stage: int, keep: Sequence[torch.Tensor]) -> None:
        for descent, mask in zip(self._descents.values(), keep, strict=True):
            descent.step(mask)

    @override
    def finish(self) -> dict[str, Solved]:
        for descent in self._descents.values():
            for _ in range(NUM_CLOSING, NUM_STEPS):
                descent.step(None)
        return {name: Solved(*of.finish(), self._inputs.damping) for name, of in self._descents.items()}


def _closed(step: int) -> float:
    """Return how much of the mask is closed at ``step``."""
    return 1 - (1 - step / NUM_CLOSING) ** 3


def _part_of(pattern: Pattern, closed: float) -> Pattern:
    """Return the pattern that prunes the share ``closed`` of what ``pattern`` does."""
    if closed == 1:
        return pattern

    def part(share: int | float) -> int | float:
        return closed * share if isinstance(share, float) else int(closed * share)

    shares = vars(pattern)["sparsity"]
    less = {name: part(share) for name, share in shares.items()} if isinstance(shares, Mapping) else part(shares)
    return dataclasses.replace(pattern, sparsity=less)  # type: ignore[type-var]


@lru_cache(maxsize=64)
def _num_pruned(pattern: Pattern, num_in: int) -> int:
    """Return how many weights ``pattern`` prunes of a row: alike in all rows, so that one on the host is asked."""
    return int((~pattern.keep(torch.arange(num_in, dtype=torch.float32, device="cpu")[None])).sum())


def _keep(size: torch.Tensor, pattern: Pattern, share: float) -> torch.Tensor:
    """Return what stays of ``size`` (rows, in) while ``share`` of what ``pattern`` prunes in a row goes."""
    size = as_keys(size)
    if share == 1 or not len(size):
        return pattern.keep(size)
    num_pruned = int(share * _num_pruned(pattern, size.shape[1]))
    if pattern.width != 1:  # within groups: the smallest of those that are to go
        highest = torch.inf if size.is_floating_point() else torch.iinfo(size.dtype).max
        size = size.masked_fill(pattern.keep(size), highest)
    return keep_highest_per_row(size, num_pruned)
