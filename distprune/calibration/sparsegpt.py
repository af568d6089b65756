"""SparseGPT: arXiv 2301.00774, Algorithm 1.

The rows of a map are swept by themselves, column by column, once the factor of the inverse of
H = 2 X^T X / tokens is there; they need each other only to agree on which weights of a block of columns go,
over all rows, which is a selection. So rows are best swept where all of their map are: see
:mod:`distprune.calibration.homes`. Those of maps that are spread over the ranks are swept side by side, so that
one selection over the ranks serves all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from distprune.calibration.keep import keep_blocks, keep_weights
from distprune.calibration.moved_rows import move_rows
from distprune.calibration.outcome import Outcome
from distprune.calibration.rows import Rows
from distprune.calibration.statistics import Moments
from distprune.calibration.triangle import pack_triangle, unpack_triangle
from distprune.collectives import Alone, Communicator, agree, broadcast_tensor, together
from distprune.masks import zero_where_pruned
from distprune.scores import Magnitude
from distprune.selection import (
    Block,
    NByM,
    Pattern,
    PerRow,
    Unstructured,
    keep_highest_per_group,
    keep_highest_per_row,
)

__all__ = ["COLUMNS", "DAMPING", "Factor", "factor", "prune_by_sparsegpt"]

COLUMNS = 128  # that are decided together, section 3.4 of the paper
DAMPING = 0.01  # of the mean diagonal, as in the authors' code
_MAX_RAISED = 8
_PART = 16  # columns swept one by one before the rest of their block is brought up to date, by a matrix product
_STRETCH = 192  # columns of a triangular matrix that are inverted together


@dataclass(frozen=True)
class Factor:
    """``upper`` (in, in), float32: the inverse of the damped H is upper^T upper.

    ``dead`` (in,) says which inputs were always 0; ``added`` was added to the diagonal: 0.01 of its mean,
    times ten for each of ``num_raised``.
    """

    upper: torch.Tensor
    dead: torch.Tensor
    num_raised: int
    added: float


def factor(products: torch.Tensor, num_tokens: int) -> Factor:
    """Return the factor for X^T X = ``products`` (in, in), float32 and symmetric, which is overwritten. Local.

    Without tokens, as for an expert that nothing was routed to, the inputs count as white: X^T X = 1.
    Damping begins with 0.01 of the mean diagonal and is raised tenfold as long as H is not positive definite.

    Raises:
        ValueError: no damping up to a million times the mean diagonal helps.
    """
    h = products.mul_(2 / max(num_tokens, 1)) if num_tokens else products.zero_()
    if not num_tokens:
        h.diagonal().fill_(2)
    dead = h.diagonal() == 0
    h.diagonal()[dead] = 1
    diagonal = h.diagonal().clone()
    mean = float(diagonal.mean())
    for num_raised in range(_MAX_RAISED + 1):
        added = DAMPING * 10**num_raised * mean
        h.diagonal().copy_(diagonal + added)
        # H turned end to end is L L^T; so H is R R^T with R, L turned, upper, and H^-1 is (R^-1)^T R^-1.
        lower, info = torch.linalg.cholesky_ex(h.flip(0, 1))
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            upper = _inverse(lower.flip(0, 1))
            if bool(torch.isfinite(upper).all()):
                return Factor(upper, dead, num_raised, added)
    raise ValueError(f"the second moments of {len(h)} inputs are not positive definite with any damping")


def _inverse(upper: torch.Tensor) -> torch.Tensor:
    """Return the inverse of an upper triangular matrix: a stretch of columns needs only the rows down to its end."""
    inverse = torch.zeros_like(upper)
    for start in range(0, len(upper), _STRETCH):
        stop = min(start + _STRETCH, len(upper))
        unit = torch.zeros((stop, stop - start), dtype=upper.dtype, device=upper.device)
        unit[start:].fill_diagonal_(1)
        inverse[:stop, start:stop] = torch.linalg.solve_triangular(upper[:stop, :stop], unit, upper=True)
    return inverse


class _Sweep:
    """The rows of all maps that share an input, on their way, side by side: an operation serves all of them.

    ``weight`` is (in, rows), float32, so that a column lies together; ``part`` says which rows are whose.
    """

    def __init__(self, rows: Mapping[str, Rows], factor: Factor) -> None:
        self.factor = factor
        ends = list(itertools.accumulate(len(of_map.weight) for of_map in rows.values()))
        self.part = {name: slice(end - len(rows[name].weight), end) for name, end in zip(rows, ends, strict=True)}
        num_in = next(iter(rows.values())).num_in
        device = next(iter(rows.values())).weight.device
        self.weight = torch.empty((num_in, ends[-1]), device=device)
        for name, of_map in rows.items():
            self.weight[:, self.part[name]] = of_map.weight.t()
        self.weight[factor.dead] = 0
        self._num_pruned = torch.zeros(ends[-1], dtype=torch.int64, device=device)  # by row
        self._errors = torch.zeros(ends[-1], dtype=torch.float64, device=device)  # under the damped H, by row

    def scores(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return w^2 / [H^-1]_jj^2 of columns ``start`` to ``stop`` of map ``name``, (rows, columns)."""
        weight = self.weight[start:stop, self.part[name]]
        if weight.shape[1] == 0:
            return weight.new_empty((0, stop - start))
        return _scores(weight, self.factor.upper.diagonal()[start:stop])

    def run(self, start: int, stop: int, keep: Mapping[str, torch.Tensor] | NByM) -> None:
        """Prune columns ``start`` to ``stop``: all but ``keep`` (rows, columns), or group by group as they come up."""
        block, upper = self.weight[start:stop], self.factor.upper
        if block.shape[1] == 0:
            return
        diagonal = upper.diagonal()[start:stop]
        stays = torch.empty_like(block, dtype=torch.bool)
        scales = torch.empty_like(block)  # 1 / [H^-1]_jj of what goes, 0 of what stays
        if not isinstance(keep, NByM):
            for name, part in self.part.items():
                stays[:, part] = keep[name].t()
            torch.div(~stays, diagonal[:, None], out=scales)
        errors = torch.empty_like(block)
        columns, of_columns, scale_of = block.unbind(), errors.unbind(), scales.unbind()
        m = keep.m if isinstance(keep, NByM) else 1
        step = m * max(1, _PART // m)
        for first in range(0, stop - start, step):
            end = min(first + step, stop - start)
            part_upper = upper[start + first : start + end, start + first : start + end]
            for i in range(first, end):
                if isinstance(keep, NByM) and i % m == 0:
                    scores = _scores(block[i : i + m], diagonal[i : i + m])
                    stays[i : i + m] = keep_highest_per_group(scores, keep.n, m).t()
                    torch.div(~stays[i : i + m], diagonal[i : i + m, None], out=scales[i : i + m])
                torch.mul(columns[i], scale_of[i], out=of_columns[i])
                if i + 1 < end:
                    block[i + 1 : end].addr_(part_upper[i - first, i - first + 1 :], of_columns[i], alpha=-1)
            if end < stop - start:
                block[end:].addmm_(
                    upper[start + first : start + end, start + end : stop].t(), errors[first:end], alpha=-1
                )
        if stop < len(self.weight):
            self.weight[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
        zero_where_pruned(block, stays)
        self._errors += errors.square_().sum(dim=0, dtype=torch.float64)
        self._num_pruned += len(stays) - stays.sum(dim=0)

    def finish(self, name: str, original: torch.Tensor, output: float) -> Outcome:
        """Write the new weights of map ``name`` into ``original`` (rows, in) and return what became of them.

        With W - W' = E upper, E the errors, the error under the damped H is ||E||^2; what the damping
        added to it is taken off again.
        """
        part = self.part[name]
        new = self.weight[:, part].t()
        change = (original.float() - new).mul_(~self.factor.dead)
        added = self.factor.added * float(change.square_().sum(dtype=torch.float64))
        original.copy_(new)
        num_zeros = original.numel() - int(torch.count_nonzero(original))
        error = float(self._errors[part].sum())
        return Outcome(int(self._num_pruned[part].sum()), num_zeros, max(error - added, 0.0), output)


def prune_by_sparsegpt(
    comm: Communicator,
    prefix: str,
    rows: Mapping[str, Rows],
    moments: list[Moments],
    pattern: Pattern,
    clock: Callable[[str], AbstractContextManager[None]],
) -> tuple[dict[str, Outcome], dict[str, float]]:
    """Prune ``rows`` (by map; of the block ``prefix``) in place and return the outcomes and the damping, by map.

    ``moments`` are of ``"pairs"``, with what they are of on their homes, and are used up. Arithmetic is float32.
    Unstructured: exactly ``round(amount * out * columns)`` of every block of 128 columns, over all rows of all
    ranks; blocks of weights: that fraction of those in each block of columns, by the sums of their scores; the
    other patterns are settled by each row. The errors returned are those of H itself, without the damping;
    outcomes count on the rank that did the work, and are nothing elsewhere.

    Every rank must call it. Rounds: those of ``move_rows`` and its ``back()``, and 2 of little; where inputs are
    spread, for each of them 1 (its factor, 2 bytes a pair), 1 of little for all, and for each block of columns, for
    all of their maps together, one ``select_lowest`` (unstructured) or one ``decide_blocks`` (blocks of weights).
    Beside the moments, one factor and the float32 rows of its maps are in memory at a time; of spread inputs, all.

    Raises:
        ValueError: on every rank: no damping makes an H positive definite, or new weights are not finite. Rows of
            this block may have been changed.
    """
    home = {name: m.home.rank for m in moments if not m.home.spread for name in m.names}
    with clock("sweep"):
        moved = move_rows(comm, rows, home)
    work = _Work(prefix, moved.rows, pattern, clock)
    spread: list[Moments] = []
    factors: dict[tuple[str, ...], Factor] = {}
    error: Exception | None = None
    try:
        while moments:  # what is done with is let go of
            m = moments.pop(0)
            if m.home.spread:
                spread.append(m)
            if m.home.spread or m.home.rank == comm.rank:
                work.note_outputs(m)
            if m.home.rank == comm.rank:
                with clock("factor"):
                    made = factor(m.values, m.num_tokens)
                if m.home.spread:
                    factors[m.names] = made
                else:
                    work.sweep(Alone(), {m.names: made})
    except Exception as caught:
        error = caught
    with clock("sweep"):  # or wait for those that still do
        agree(comm, {}, error)
    if spread:
        with clock("factor"):
            factors = {m.names: _broadcast(comm, factors.get(m.names), m) for m in spread}
        work.sweep(comm, factors)
    with clock("sweep"):
        moved.back()
    num_raised = comm.max(torch.tensor([work.num_raised.get(name, 0) for name in rows], dtype=torch.int64)).tolist()
    outcomes = {name: work.outcomes[name] if of_map.owned else Outcome() for name, of_map in moved.rows.items()}
    return outcomes, {name: DAMPING * 10**num for name, num in zip(rows, num_raised, strict=True)}


@dataclass
class _Work:
    """What this rank does to the ``rows`` of a block."""

    prefix: str
    rows: Mapping[str, Rows]
    pattern: Pattern
    clock: Callable[[str], AbstractContextManager[None]]
    outputs: dict[str, float] = field(default_factory=dict)  # under H
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    num_raised: dict[str, int] = field(default_factory=dict)

    def note_outputs(self, m: Moments) -> None:
        """To be called before the moments are used up."""
        with self.clock("sweep"):
            for name in m.names:
                self.outputs[name] = m.squared_output(self.rows[name].weight) * 2 / max(m.num_tokens, 1)

    def sweep(self, comm: Communicator, factors: Mapping[tuple[str, ...], Factor]) -> None:
        """Prune the maps of ``factors``, of which the ranks of ``comm`` hold all rows, side by side."""
        with self.clock("sweep"):
            rows = {name: self.rows[name] for names in factors for name in names}
            sweeps = [_Sweep({name: rows[name] for name in names}, made) for names, made in factors.items()]
            sweep_of = {name: sweep for sweep in sweeps for name in sweep.part}
            pattern = self.pattern
            width = pattern.m if isinstance(pattern, NByM) else pattern.size if isinstance(pattern, Block) else 1
            step = width * max(1, COLUMNS // width)
            for start in range(0, max(of_map.num_in for of_map in rows.values()), step):
                part = {name: min(start + step, r.num_in) for name, r in rows.items() if start < r.num_in}
                keep = (
                    pattern
                    if isinstance(pattern, NByM)
                    else _keep(comm, self.prefix, rows, sweep_of, start, part, pattern)
                )
                for sweep in sweeps:
                    if start < len(sweep.weight):
                        sweep.run(start, min(start + step, len(sweep.weight)), keep)
            with together(comm):
                bad: list[str] = []
                for name, sweep in sweep_of.items():
                    self.outcomes[name] = sweep.finish(name, rows[name].weight, self.outputs[name])
                    self.num_raised[name] = sweep.factor.num_raised
                    if not bool(torch.isfinite(rows[name].weight).all()):
                        bad.append(name)
                if bad:
                    raise ValueError(
                        f"block {self.prefix!r}: the new weights of {', '.join(map(repr, bad[:5]))} are NaN or "
                        f"infinite in {rows[bad[0]].weight.dtype}"
                    )


def _scores(columns: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    return (columns / diagonal[:, None]).square_().t().contiguous()


def _keep(
    comm: Communicator,
    prefix: str,
    rows: Mapping[str, Rows],
    sweep_of: Mapping[str, _Sweep],
    start: int,
    part: Mapping[str, int],
    pattern: Unstructured | PerRow | Block,
) -> dict[str, torch.Tensor]:
    """Return what stays (rows, columns) of the columns from ``start`` to before ``part[name]``, by map."""
    scores = {name: sweep_of[name].scores(name, start, stop) for name, stop in part.items()}
    if isinstance(pattern, PerRow):
        # Rounded so that the counts of all blocks add up to that of the row.
        return {
            name: keep_highest_per_row(scores[name], round(pattern.amount * stop) - round(pattern.amount * start))
            for name, stop in part.items()
        }
    shards = [rows[name].shard(f"{prefix}.{name}", scores[name]) for name in part]
    if isinstance(pattern, Block):
        return dict(zip(part, keep_blocks(comm, shards, pattern), strict=True))
    return dict(
        zip(part, keep_weights(comm, shards, [Magnitude(shard) for shard in shards], pattern.amount), strict=True)
    )


def _broadcast(comm: Communicator, own: Factor | None, m: Moments) -> Factor:
    """Return the factor that the home of ``m`` has made; one round."""
    size = m.values.shape[0]
    num_rows = size // 2 + 1  # of the triangle, packed
    message = torch.empty(num_rows * size + size + 2) if own is None else _message(own)
    message = broadcast_tensor(comm, message, m.home.rank)
    if own is not None:
        return own
    upper = unpack_triangle(message[: num_rows * size].view(num_rows, size).to(m.values.device)).triu_()
    dead = message[num_rows * size : -2].to(upper.device) != 0
    return Factor(upper, dead, int(message[-2]), float(message[-1]))


def _message(own: Factor) -> torch.Tensor:
    numbers = torch.tensor([own.num_raised, own.added])
    return torch.cat([pack_triangle(own.upper).cpu().reshape(-1), own.dead.cpu().float(), numbers])
