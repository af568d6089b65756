"""ADMM with a mask that closes step by step: Boža, arXiv 2401.02938, section 3 and Algorithm 1.

The weights that stay are refitted by least squares while the mask grows to what the pattern asks for. Rows are
independent once the inverse for their inputs is there: ranks do not talk while a layer is solved.

Shapes: W is (rows, in). S holds the norm of each input, (in,); A = S^-1 X^T X S^-1 has ones on its diagonal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from distprune.calibration import Moments, MomentsOf, pack_triangle, unpack_triangle
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Solved, Solver, Solving
from distprune.patterns import Pattern
from distprune.selection import keep_highest_per_row

__all__ = ["ADMM"]

PENALTY = 1.0  # rho
NUM_STEPS, NUM_CLOSING = 20, 15  # the mask moves in the first ones, and is complete after them
_SMALLEST_NORM = 1e-8
_CHUNK = 1 << 20  # weights that are solved at a time; some ten such matrices are in memory


@dataclass(frozen=True)
class ADMM(Solver):
    """``damping`` is added to the diagonal of A. Arithmetic is float32; unstructured means of each row.

    Weights of inputs that were always 0 become 0. Zeros go first. The errors are those of X^T X, without the damping.
    """

    needs: ClassVar[MomentsOf] = "pairs"
    damping: float = 0.1  # lambda

    @override
    def stages(self, num_in: int, pattern: Pattern) -> Sequence[tuple[int, int]]:
        if not pattern.by_row().is_by_row:
            raise NotImplementedError(f"ADMM settles each row by itself, which {pattern!r} does not")
        return ()

    @override
    def prepared_numel(self, num_in: int) -> int:
        return 2 * (num_in // 2 + 1) * num_in + num_in

    @override
    def prepare(self, moments: Moments) -> Moments:
        products = moments.values
        if not moments.num_tokens:  # an expert that nothing was routed to: as if its inputs were white
            products = torch.eye(len(products), device=products.device)
        scale = products.diagonal().sqrt() + _SMALLEST_NORM
        a = products / scale / scale[:, None]
        damped = a.clone()
        damped.diagonal().add_(self.damping + PENALTY)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) != 0 or not bool(torch.isfinite(lower).all()):
            raise ValueError(
                f"the second moments of the {len(a)} inputs of {moments.names[0]!r} have no inverse with "
                f"damping={self.damping}; raise it, as ADMM(damping={10 * self.damping})"
            )
        packed = [pack_triangle(torch.cholesky_inverse(lower)).reshape(-1), pack_triangle(a).reshape(-1), scale]
        return dataclasses.replace(moments, values=torch.cat(packed))

    @override
    def prune(self, rows: Mapping[str, Rows], moments: Moments, pattern: Pattern) -> Solving:
        yield from ()
        solved: dict[str, Solved] = {}
        first = next(iter(rows.values()))
        inputs = _Inputs.of(moments.values.to(first.weight.device), first.num_in)
        step = max(1, _CHUNK // max(first.num_in, 1))
        for name, of_layer in rows.items():
            own, num_pruned, error = pattern.by_row().of(of_layer.name), 0, 0.0
            for weight in torch.split(of_layer.weight, step):
                num_gone, of_rows = _solve(weight, inputs, own)
                num_pruned, error = num_pruned + num_gone, error + of_rows
            solved[name] = Solved(num_pruned, error, self.damping)
        return solved


@dataclass(frozen=True)
class _Inputs:
    """``inverse`` is (A + (lambda + rho) I)^-1, (in, in), as ``a``; ``scale`` (in,) is S."""

    inverse: torch.Tensor
    a: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def of(packed: torch.Tensor, num_in: int) -> _Inputs:
        half = (packed.numel() - num_in) // 2
        inverse, a, scale = torch.split(packed, [half, half, num_in])
        return _Inputs(unpack_triangle(inverse.view(-1, num_in)), unpack_triangle(a.view(-1, num_in)), scale)


def _solve(weight: torch.Tensor, inputs: _Inputs, pattern: Pattern) -> tuple[int, float]:
    """Write new weights into ``weight`` (rows, in). Return how many the mask prunes, and ||X (W - W')^T||^2."""
    before = weight.float() * inputs.scale
    gone = weight == 0
    # With W_n = W S: W_n (A + lambda I) P = W_n - rho W_n P.
    aim = torch.addmm(before, before, inputs.inverse, alpha=-PENALTY)
    v, keep = before.clone(), ~gone
    for step in range(1, NUM_STEPS + 1):
        if step <= NUM_CLOSING:
            keep = _keep(v.abs().masked_fill_(gone, 0), pattern, 1 - (1 - step / NUM_CLOSING) ** 3).logical_and_(~gone)
        target = torch.where(keep, v, -v)
        v.sub_(target).div_(2).add_(aim).addmm_(target, inputs.inverse, alpha=PENALTY)
    after = v.mul_(keep)
    after[:, inputs.scale == _SMALLEST_NORM] = 0
    change = before - after
    error = float((change @ inputs.a).mul_(change).sum(dtype=torch.float64))
    weight.copy_(after / inputs.scale)
    return keep.numel() - int(torch.count_nonzero(keep)), error


def _keep(size: torch.Tensor, pattern: Pattern, share: float) -> torch.Tensor:
    """Return what stays of ``size`` (rows, in) while ``share`` of what ``pattern`` prunes in a row goes."""
    if share == 1 or not len(size):
        return pattern.keep(size)
    num_pruned = int(share * int((~pattern.keep(size[:1])).sum()))  # alike in all rows
    if pattern.width != 1:  # within groups: the smallest of those that are to go
        size = size.masked_fill(pattern.keep(size), torch.inf)
    return keep_highest_per_row(size, num_pruned)
