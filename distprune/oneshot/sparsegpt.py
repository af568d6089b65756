"""SparseGPT: arXiv 2301.00774, Algorithm 1.

The rows of a layer are swept by themselves, column by column, once the factor of the inverse of
H = 2 X^T X / tokens is there; they need each other only to agree on which weights of a block of columns go,
over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Integral
from typing import ClassVar

import torch
from typing_extensions import override

from distprune.calibration.moments import Moments, Needs
from distprune.kernels.available import has_kernels
from distprune.kernels.sweep import sweep
from distprune.masks.in_place import zero_where_pruned
from distprune.oneshot.damping import damped_factor
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import SIZES, Choose, Solved, Solver, as_keys
from distprune.patterns.base import Pattern, shares_of
from distprune.patterns.n_by_m import NByM
from distprune.shards.device import on_host

COLUMNS = 128  # that are decided together, section 3.4 of the paper
DAMPING = 0.01  # of the mean diagonal, as in the authors' code
_PART = 16  # columns swept one by one before the rest of their block is brought up to date, by a matrix product
_STRETCH = 192  # columns of a triangular matrix that are inverted together


def _inverse(upper: torch.Tensor) -> torch.Tensor:
    """Return the inverse of an upper triangular matrix, contiguous.

    A stretch of columns needs only the rows down to its end; a device does all in one step.
    """
    inverse = torch.zeros_like(upper, memory_format=torch.contiguous_format)
    stretch = _STRETCH if on_host(upper.device) else len(upper)
    for start in range(0, len(upper), stretch):
        stop = min(start + stretch, len(upper))
        unit = torch.zeros((stop, stop - start), dtype=upper.dtype, device=upper.device)
        unit[start:].fill_diagonal_(1)
        inverse[:stop, start:stop] = torch.linalg.solve_triangular(upper[:stop, :stop], unit, upper=True)
    return inverse


@dataclass(frozen=True)
class SparseGPT(Solver):
    """Prunes column by column, and hands each error on to the rest of the row (arXiv 2301.00774).

    >>> prune_blocks(llama, samples, method=SparseGPT(), pattern="2:4").sparsity
    0.5

    Arithmetic is float32. Unstructured: exactly ``round(sparsity * out * columns)`` of every block of 128 columns,
    over all rows; blocks of weights: that fraction of those in each block of columns, by the sums of their scores; the
    other patterns are decided by each row. The errors are those of X^T X itself, without the damping.
    """

    needs: ClassVar[Needs] = "products"

    @override
    def check(self, pattern: Pattern) -> None:
        if not pattern.width:
            raise NotImplementedError(f"SparseGPT decides block of columns by block of columns, not by {pattern!r}")
        if any(isinstance(share, Integral) and share for share in shares_of(vars(pattern).get("sparsity", 0.0))):
            raise NotImplementedError(f"SparseGPT prunes a share of each block of columns, not a number: {pattern!r}")

    @override
    def prepare(self, moments: Moments) -> dict[str, torch.Tensor]:
        """Return ``upper`` (in, in), float32: the inverse of the damped H is U^T U, U its upper triangle.

        No more of it is read. ``damping``: which fraction of the mean of the diagonal was added to it, 0.01, or ten
        times as much for each time it was raised.
        """
        assert moments.products is not None
        h = moments.products.float().mul_(2 / max(moments.num_tokens, 1))
        h.diagonal().masked_fill_(h.diagonal() == 0, 1)
        mean = h.diagonal().mean().double()
        # With J reversing rows and columns, JHJ = L L^T; R = JLJ is upper triangular, H = R R^T, and U = R^-1.
        lower, num_raised = damped_factor(h.flip(0, 1), DAMPING * mean, moments.names[0])
        return {"upper": _inverse(lower.flip(0, 1)), "damping": torch.full_like(mean, DAMPING * 10**num_raised)}

    @override
    def solve(self, rows: Mapping[str, Rows], moments: Moments, pattern: Pattern, choose: Choose) -> dict[str, Solved]:
        swept = _Sweep(rows, moments.prepared["upper"], moments.squares == 0)
        num_in, step = len(moments.squares), pattern.width * max(1, COLUMNS // pattern.width)
        for start in range(0, num_in, step):
            stop = min(start + step, num_in)
            if pattern.is_by_row:
                swept.by_row(start, stop, pattern)
                continue
            sizes = {name: swept.sizes(start, stop, part) for name, part in swept.part.items()}
            stays = torch.cat([*choose(sizes, pattern.part(start, stop), SIZES).values()])
            swept.run(start, stop, stop - start, lambda *_, stays=stays: stays)
        return {name: Solved(mask, moments.prepared["damping"]) for name, mask in swept.finish().items()}


class _Sweep:
    """The rows of all layers that share an input, on their way, side by side: an operation serves all of them.

    ``weight`` is (in, rows), float32, as ``stays``: a column lies together, but for kernels, where a row does.
    ``part`` says which rows are whose. Inputs that are ``dead`` (in,) were always 0.
    """

    def __init__(self, rows: Mapping[str, Rows], upper: torch.Tensor, dead: torch.Tensor) -> None:
        self._rows, self._upper, self._on_gpu = rows, upper, has_kernels(upper.device)
        weight = torch.cat([layer.weight.float() for layer in rows.values()]).t()
        self.weight = weight if self._on_gpu else weight.contiguous()
        self.weight.masked_fill_(dead[:, None], 0)
        self.stays = torch.ones_like(self.weight, dtype=torch.bool)
        ends = [0, *accumulate(len(layer.weight) for layer in rows.values())]
        self.part = {name: slice(*both) for name, both in zip(rows, pairwise(ends), strict=True)}

    def sizes(self, start: int, stop: int, part: slice = slice(None)) -> torch.Tensor:
        """Return w^2 / [H^-1]_jj^2 of columns ``start`` to ``stop`` of rows ``part``, (rows, columns)."""
        return (self.weight[start:stop, part] / self._upper.diagonal()[start:stop, None]).square_().t().contiguous()

    def by_row(self, start: int, stop: int, pattern: Pattern) -> None:
        """Prune columns ``start`` to ``stop`` by the layers' own patterns; groups are decided as they come up."""
        if self._on_gpu and isinstance(pattern, NByM) and pattern.m <= COLUMNS:
            sweep(self.weight.t(), self.stays.t(), self._upper, slice(start, stop), pattern.n, pattern.m)
            return
        parts = [(pattern.of(self._rows[name].name), part) for name, part in self.part.items()]
        if all(other == parts[0][0] for other, _ in parts):
            parts = [(parts[0][0], slice(None))]

        def keep(start: int, stop: int) -> torch.Tensor:
            return torch.cat([one.part(start, stop).keep(as_keys(self.sizes(start, stop, at))) for one, at in parts])

        self.run(start, stop, pattern.width if pattern.width > 1 else stop - start, keep)

    def run(self, start: int, stop: int, group: int, keep: Callable[[int, int], torch.Tensor]) -> None:
        """Prune columns ``start`` to ``stop``, of all rows; ``keep(a, b)`` says what stays of columns ``a`` to ``b``.

        It is asked for every ``group`` of columns as they come up.
        """
        block, stays, upper = self.weight[start:stop], self.stays[start:stop], self._upper
        if block.shape[1] == 0:
            return
        if self._on_gpu:
            for first in range(start, stop, group):
                self.stays[first : first + group] = keep(first, first + group).t()
                sweep(self.weight.t(), self.stays.t(), upper, slice(first, first + group))
            return
        diagonal = upper.diagonal()[start:stop, None]
        scales, errors = torch.empty_like(block), torch.empty_like(block)  # 1 / [H^-1]_jj of what goes, 0 of what stays
        columns, error_of, scale_of = block.unbind(), errors.unbind(), scales.unbind()
        step = _PART if group >= len(block) else group * max(1, _PART // group)
        for first in range(0, len(block), step):
            end = min(first + step, len(block))
            part_upper = upper[start + first : start + end, start + first : start + end]
            for i in range(first, end):
                if i % group == 0:
                    some = slice(i, i + group)
                    stays[some] = keep(start + i, start + i + group).t()
                    torch.div(~stays[some], diagonal[some], out=scales[some])
                torch.mul(columns[i], scale_of[i], out=error_of[i])
                block[i + 1 : end].addr_(part_upper[i - first, i - first + 1 :], error_of[i], alpha=-1)
            later = upper[start + first : start + end, start + end : stop].t()
            block[end:].addmm_(later, errors[first:end], alpha=-1)
        self.weight[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
        zero_where_pruned(block, stays)

    def finish(self) -> dict[str, torch.Tensor]:
        """Write the new weights of all layers, and return what stays, by layer (rows, in)."""
        for name, part in self.part.items():
            self._rows[name].weight.copy_(self.weight[:, part].t())
        return {name: self.stays[:, part].t() for name, part in self.part.items()}
