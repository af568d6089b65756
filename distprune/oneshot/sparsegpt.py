"""SparseGPT: arXiv 2301.00774, Algorithm 1.

The rows of a layer are swept by themselves, column by column, once the factor of the inverse of
H = 2 X^T X / tokens is there; they need each other only to agree on which weights of a block of columns go,
over all rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from typing_extensions import override

from distprune.calibration.moments import Moments, MomentsOf
from distprune.masks.in_place import zero_where_pruned
from distprune.oneshot.damping import damped_factor
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Computed, Pruning, Solved, Solver, Stage, as_keys
from distprune.patterns.base import Pattern
from distprune.scores.base import LocalScores, Score, local_scores

COLUMNS = 128  # that are decided together, section 3.4 of the paper
DAMPING = 0.01  # of the mean diagonal, as in the authors' code
_PART = 16  # columns swept one by one before the rest of their block is brought up to date, by a matrix product
_STRETCH = 192  # columns of a triangular matrix that are inverted together


@dataclass(frozen=True)
class Factor:
    """``upper`` (in, in), float32: the inverse of the damped H is U^T U, U its upper triangle. No more of it is read.

    ``dead`` (in,) says which inputs were always 0. ``numbers`` (3,), float64: which fraction of the mean of its
    diagonal was added to it (0.01, or ten times as much for each time it was raised), how much that is, and how many
    times H is X^T X.
    """

    upper: torch.Tensor
    dead: torch.Tensor
    numbers: torch.Tensor


def factor(products: torch.Tensor, num_tokens: int, name: str) -> Factor:
    """Return the factor for X^T X = ``products`` (in, in), float32 and symmetric, which is overwritten. Local.

    Without tokens, as for an expert that nothing was routed to, the inputs count as white: X^T X = 1.
    Damping begins with 0.01 of the mean diagonal; see :func:`damped_factor`, also for what is raised.
    """
    h = products.mul_(2 / max(num_tokens, 1)) if num_tokens else products.zero_()
    if not num_tokens:
        h.diagonal().fill_(2)
    dead = h.diagonal() == 0
    h.diagonal().masked_fill_(dead, 1)
    mean = h.diagonal().mean().double()
    upper, num_raised = damped_factor(h, DAMPING * mean, name, factorize=_inverse_factor)
    fraction = DAMPING * 10**num_raised
    numbers = torch.full((3,), fraction, dtype=torch.float64, device=h.device)
    numbers[1] = fraction * mean
    numbers[2] = max(num_tokens, 1) / 2
    return Factor(upper, dead, numbers)


def _inverse_factor(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return upper triangular U with H^-1 = U^T U, and 0, or whatever and another number, without waiting for a device.

    With J reversing rows and columns, JHJ = L L^T; R = JLJ is upper triangular, H = R R^T, and U = R^-1.
    """
    lower, info = torch.linalg.cholesky_ex(h.flip(0, 1))
    return _inverse(lower.flip(0, 1)), info


def _inverse(upper: torch.Tensor) -> torch.Tensor:
    """Return the inverse of an upper triangular matrix: a stretch of columns needs only the rows down to its end."""
    inverse = torch.zeros_like(upper)
    for start in range(0, len(upper), _STRETCH):
        stop = min(start + _STRETCH, len(upper))
        unit = torch.zeros((stop, stop - start), dtype=upper.dtype, device=upper.device)
        unit[start:].fill_diagonal_(1)
        inverse[:stop, start:stop] = torch.linalg.solve_triangular(upper[:stop, :stop], unit, upper=True)
    return inverse


@dataclass(frozen=True)
class SparseGPT(Solver[Factor]):
    """Prunes column by column, and hands each error on to the rest of the row (arXiv 2301.00774).

    >>> prune_blocks(llama, samples, method=SparseGPT(), pattern="2:4").sparsity
    0.5

    Arithmetic is float32. Unstructured: exactly ``round(sparsity * out * columns)`` of every block of 128 columns,
    over all rows; blocks of weights: that fraction of those in each block of columns, by the sums of their scores; the
    other patterns are decided by each row. The errors are those of X^T X itself, without the damping.
    """

    needs: ClassVar[MomentsOf] = "pairs"
    sends: ClassVar[bool] = True
    triangles: ClassVar[Collection[str]] = ("upper",)
    score: Score = field(default=Computed(), init=False)  # w^2 / [H^-1]_jj^2

    @override
    def stages(self, num_in: int, pattern: Pattern) -> Sequence[Stage]:
        if pattern.is_by_row:
            return ()
        return [Stage(start, stop, pattern.part(start, stop)) for start, stop in _columns(num_in, pattern)]

    @override
    def prepare(self, moments: Moments) -> Factor:
        return factor(moments.values, moments.num_tokens, moments.names[0])

    @override
    def sent_like(self, rows: Rows) -> Factor:
        dead = torch.empty(rows.num_in, dtype=torch.bool, device="meta")
        numbers = torch.empty(3, dtype=torch.float64, device="meta")
        return Factor(torch.empty((rows.num_in, rows.num_in), dtype=torch.float32, device="meta"), dead, numbers)

    @override
    def begin(self, rows: Mapping[str, Rows], prepared: Factor, pattern: Pattern) -> Pruning:
        return _Sweep(rows, prepared, pattern, self.score)


def _columns(num_in: int, pattern: Pattern) -> list[tuple[int, int]]:
    """Return the blocks of columns that are swept in turn."""
    if not pattern.width:
        raise NotImplementedError(f"SparseGPT decides block of columns by block of columns, which {pattern!r} does not")
    step = pattern.width * max(1, COLUMNS // pattern.width)
    return [(start, min(start + step, num_in)) for start in range(0, num_in, step)]


class _Sweep(Pruning):
    """The rows of all layers that share an input, on their way, side by side: an operation serves all of them.

    ``weight`` is (in, rows), float32, so that a column lies together; ``part`` says which rows are whose.
    """

    def __init__(self, rows: Mapping[str, Rows], factor: Factor, pattern: Pattern, score: Score) -> None:
        self.rows, self.factor, self._pattern, self._score = rows, factor, pattern, score
        ends = list(itertools.accumulate(len(of_layer.weight) for of_layer in rows.values()))
        self.part = {name: slice(end - len(rows[name].weight), end) for name, end in zip(rows, ends, strict=True)}
        num_in = next(iter(rows.values())).num_in
        self._columns = _columns(num_in, pattern)
        device = next(iter(rows.values())).weight.device
        self.weight = torch.empty((num_in, ends[-1]), dtype=torch.float32, device=device)
        for name, of_layer in rows.items():
            self.weight[:, self.part[name]] = of_layer.weight.t()
        self.weight.masked_fill_(factor.dead[:, None], 0)
        self._num_pruned = torch.zeros(ends[-1], dtype=torch.int64, device=device)  # by row
        self._errors = torch.zeros(ends[-1], dtype=torch.float64, device=device)  # under the damped H, by row

    @override
    def scores(self, stage: int) -> list[LocalScores]:
        shards = [self.rows[name].shard(self._sizes(*self._columns[stage], part)) for name, part in self.part.items()]
        return local_scores(self._score, shards)

    @override
    def apply(self, stage: int, keep: Sequence[torch.Tensor]) -> None:
        stays = torch.cat(list(keep))
        self._run(*self._columns[stage], 0, lambda *_: stays)

    @override
    def finish(self) -> dict[str, Solved]:
        if self._pattern.is_by_row:
            group = self._pattern.width if self._pattern.width > 1 else 0  # decided as its columns come up
            for start, stop in self._columns:
                self._run(start, stop, group, self._stays)
        return {name: self._written(name, of_layer.weight) for name, of_layer in self.rows.items()}

    def _stays(self, start: int, stop: int) -> torch.Tensor:
        """Return what stays of columns ``start`` to ``stop``, (rows, columns), by the layers' own patterns."""
        own = [self._pattern.of(of_layer.name).part(start, stop) for of_layer in self.rows.values()]
        if all(pattern == own[0] for pattern in own):
            return own[0].keep(as_keys(self._sizes(start, stop)))
        parts = zip(own, self.part.values(), strict=True)
        return torch.cat([pattern.keep(as_keys(self._sizes(start, stop, part))) for pattern, part in parts])

    def _sizes(self, start: int, stop: int, part: slice = slice(None)) -> torch.Tensor:
        """Return w^2 / [H^-1]_jj^2 of columns ``start`` to ``stop`` of rows ``part``, (rows, columns)."""
        diagonal = self.factor.upper.diagonal()[start:stop, None]
        return (self.weight[start:stop, part] / diagonal).square_().t().contiguous()

    def _run(self, start: int, stop: int, group: int, keep: Callable[[int, int], torch.Tensor]) -> None:
        """Prune columns ``start`` to ``stop``, of all rows; ``keep(a, b)`` says what stays of columns ``a`` to ``b``.

        It is asked for every ``group`` of columns as they come up; 0: for all of them at once.
        """
        block, upper = self.weight[start:stop], self.factor.upper
        if block.shape[1] == 0:
            return
        diagonal = upper.diagonal()[start:stop, None]
        stays = torch.empty_like(block, dtype=torch.bool)
        scales, errors = torch.empty_like(block), torch.empty_like(block)  # 1 / [H^-1]_jj of what goes, 0 of what stays
        columns, of_columns, scale_of = block.unbind(), errors.unbind(), scales.unbind()
        num_asked, step = group or len(block), max(group, 1) * max(1, _PART // max(group, 1))
        for first in range(0, len(block), step):
            end = min(first + step, len(block))
            part_upper = upper[start + first : start + end, start + first : start + end]
            for i in range(first, end):
                if i % num_asked == 0:
                    some = slice(i, i + num_asked)
                    stays[some] = keep(start + i, start + i + num_asked).t()
                    torch.div(~stays[some], diagonal[some], out=scales[some])
                torch.mul(columns[i], scale_of[i], out=of_columns[i])
                if i + 1 < end:
                    block[i + 1 : end].addr_(part_upper[i - first, i - first + 1 :], of_columns[i], alpha=-1)
            if end < len(block):
                block[end:].addmm_(
                    upper[start + first : start + end, start + end : stop].t(), errors[first:end], alpha=-1
                )
        if stop < len(self.weight):
            self.weight[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
        zero_where_pruned(block, stays)
        self._errors += errors.square_().sum(dim=0, dtype=torch.float64)
        self._num_pruned += len(stays) - stays.sum(dim=0)

    def _written(self, name: str, original: torch.Tensor) -> Solved:
        """Write the new weights of layer ``name`` into ``original`` (rows, in).

        With W - W' = E upper, E the errors, the error under the damped H is ||E||^2; what the damping
        added to it is taken off again.
        """
        part = self.part[name]
        new = self.weight[:, part].t()
        change = (original.float() - new).mul_(~self.factor.dead)
        fraction, added, scale = self.factor.numbers
        errors = self._errors[part]
        error = errors.sum() - added * change.square_().sum(dtype=torch.float64)
        original.copy_(new)
        return Solved(self._num_pruned[part].sum(), error.clamp_(min=0) * scale, fraction, errors.isnan().sum())
