"""ADMM with a mask that closes step by step: Boža, arXiv 2401.02938, section 3 and Algorithm 1.

The weights that stay are refitted by least squares while the mask grows to what the pattern asks for. Rows are
independent once the inverse for their inputs is there: ranks do not talk while a layer is solved.

Shapes: W is (rows, in). S holds the norm of each input, (in,); A = S^-1 X^T X S^-1 has ones on its diagonal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import ClassVar

import torch
from typing_extensions import override

from distprune.calibration.moments import Moments, Needs
from distprune.oneshot.damping import DAMPING, damped_factor
from distprune.oneshot.rows import Rows, row_parts
from distprune.oneshot.solver import Choose, Solved, Solver, as_keys
from distprune.patterns.base import Pattern
from distprune.selection.highest import keep_highest_per_row
from distprune.shards.device import on_host

PENALTY = 1.0  # rho
NUM_STEPS, NUM_CLOSING = 8, 6  # the mask moves in the first ones, and is complete after them
_SMALLEST_NORM = 1e-8


@dataclass(frozen=True)
class ADMM(Solver):
    """Refits the weights that stay while the mask closes, row by row (arXiv 2401.02938).

    >>> prune_blocks(llama, samples, 0.5, method=ADMM(damping=0.05)).sparsity
    0.5

    ``damping`` is added to the diagonal of A (see ``damped_factor``). Arithmetic is float32; unstructured means of each
    row.

    Blocks of weights compete over all rows, by the sums of V^2, whenever the mask moves. Weights of inputs that were
    always 0 become 0. Zeros go first. The errors are those of X^T X, without the damping.
    """

    needs: ClassVar[Needs] = "products"
    damping: float = DAMPING  # lambda

    @override
    def check(self, pattern: Pattern) -> None:
        if not pattern.by_row().is_by_row and not pattern.width:
            raise NotImplementedError(f"ADMM decides rows, or blocks of weights, which {pattern!r} does not")

    @override
    def prepare(self, moments: Moments) -> dict[str, torch.Tensor]:
        """Return ``inverse``, (A + (lambda + rho) I)^-1, (in, in), and ``damping``, lambda, as far as it was raised."""
        assert moments.products is not None
        scale = _scale_of(moments)
        a = moments.products.float().div_(torch.outer(scale, scale))
        lower, num_raised = damped_factor(a, self.damping, moments.names[0], besides=PENALTY)
        damping = torch.full((), self.damping * 10**num_raised, dtype=torch.float64, device=a.device)
        return {"inverse": torch.cholesky_inverse(lower), "damping": damping}

    @override
    def solve(self, rows: Mapping[str, Rows], moments: Moments, pattern: Pattern, choose: Choose) -> dict[str, Solved]:
        inverse, scale, by_row = moments.prepared["inverse"], _scale_of(moments), pattern.by_row()
        keep: dict[str, torch.Tensor] = {}
        if by_row.is_by_row:
            for name, layer in rows.items():
                its_pattern, masks = by_row.of(layer.name), list[torch.Tensor]()
                for (weight,) in row_parts(layer.weight):
                    descent = _Descent(weight, inverse, scale)
                    for step in range(1, NUM_CLOSING + 1):
                        descent.step(_keep(descent.sizes(), its_pattern, _closed(step)))
                    masks.append(descent.finish())
                keep[name] = torch.cat([torch.empty_like(layer.weight[:0], dtype=torch.bool), *masks])
        else:
            descents = {name: _Descent(layer.weight, inverse, scale) for name, layer in rows.items()}
            for step in range(1, NUM_CLOSING + 1):
                sizes = {name: descent.sizes().square_() for name, descent in descents.items()}
                chosen = choose(sizes, _part_of(pattern, _closed(step)))
                for name, descent in descents.items():
                    descent.step(chosen[name])
            keep = {name: descent.finish() for name, descent in descents.items()}
        return {name: Solved(mask, moments.prepared["damping"]) for name, mask in keep.items()}


def _scale_of(moments: Moments) -> torch.Tensor:
    """Return S, (in,)."""
    return moments.norms + _SMALLEST_NORM


class _Descent:
    """Rows ``weight`` (rows, in) on their way. V is the fitted weights plus what the mask keeps from them.

    ``inverse`` (in, in) is symmetric; ``scale`` (in,) is S.
    """

    def __init__(self, weight: torch.Tensor, inverse: torch.Tensor, scale: torch.Tensor) -> None:
        self._weight, self._inverse, self._scale = weight, inverse, scale
        before = weight.float() * scale
        # With W_n = W S: W_n (A + lambda I) P = W_n - rho W_n P.
        self._aim = torch.addmm(before, before, inverse, alpha=-PENALTY)
        self._v, self._next = before, torch.empty_like(before)
        zeros = weight == 0
        self._zeros = zeros if not on_host(zeros.device) or bool(zeros.any()) else None  # what was pruned before
        self._dropped = torch.empty_like(before)  # 1 or 0, from the first step on

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
        beside = torch.addcmul(self._aim, self._v, self._dropped, out=self._next)
        target = self._v.addcmul_(self._v, self._dropped, value=-2)  # V where it stays, -V where it goes
        self._v, self._next = beside.addmm_(target, self._inverse, alpha=PENALTY), self._v

    def finish(self) -> torch.Tensor:
        """Take the last steps, write the new weights, and return what the mask keeps."""
        for _ in range(NUM_CLOSING, NUM_STEPS):
            self.step(None)
        dropped = self._dropped.bool()
        after = self._v.masked_fill_(dropped, 0).masked_fill_(self._scale == _SMALLEST_NORM, 0)
        self._weight.copy_(after.div_(self._scale))
        return dropped.logical_not_()


def _closed(step: int) -> float:
    """Return how much of the mask is closed at ``step``."""
    return 1 - (1 - step / NUM_CLOSING) ** 3


def _part_of(pattern: Pattern, closed: float) -> Pattern:
    """Return the pattern that prunes the share ``closed`` of what ``pattern`` does."""
    if closed == 1:
        return pattern

    def part(share: int | float) -> int | float:
        return int(closed * share) if isinstance(share, Integral) else closed * share

    shares = vars(pattern)["sparsity"]
    less = {name: part(share) for name, share in shares.items()} if isinstance(shares, Mapping) else part(shares)
    return dataclasses.replace(pattern, sparsity=less)  # type: ignore[type-var]


@lru_cache(maxsize=64)
def _num_pruned(pattern: Pattern, num_in: int) -> int:
    """Return how many weights ``pattern`` prunes of a row: alike in all rows, so that one on the host is asked."""
    return int((~pattern.keep(torch.arange(num_in, dtype=torch.float32, device="cpu")[None])).sum())


def _keep(size: torch.Tensor, pattern: Pattern, share: float) -> torch.Tensor:
    """Return what stays of ``size`` (rows, in), which is used up, while ``share`` of what ``pattern`` prunes goes."""
    size = as_keys(size)
    if share == 1 or not len(size):
        return pattern.keep(size)
    num_pruned = int(share * _num_pruned(pattern, size.shape[1]))
    if pattern.width != 1:  # within groups: the smallest of those that are to go
        highest = torch.inf if size.is_floating_point() else torch.iinfo(size.dtype).max
        size.masked_fill_(pattern.keep(size), highest)
    return keep_highest_per_row(size, num_pruned)
