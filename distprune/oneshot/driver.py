"""Runs a solver over the ranks: places rows, sends what they need, lets scores compete, and sums what was done.

Rows whose input has an owner (see :mod:`distprune.calibration.owner_ranks`) are solved there, input after input. Rows
whose input is spread are solved wherever they lie, side by side, so that one choice over the ranks serves all of them.
What a solver raises on one rank is kept until ranks next communicate, and raised on all of them there.

What rows need of a spread input, its owner factors and sends to all. Each factor is so computed once (d^3 / 3
multiplications and d^3 / 3 for the inverse, 24 TFLOP for d = 28,672), while other ranks work on inputs of their own,
and d^2 / 2 float32 travel (1.6 GB), in pieces. A factorization in blocks over ranks would be sooner done, but
would send as much, and come to other bits on every number of ranks.

On a device nobody waits for a figure of one layer: figures stay there and are fetched once, when all layers are done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from distprune.calibration.moments import Moments
from distprune.calibration.triangle import pack_triangle, triangle_shape, unpack_triangle
from distprune.collectives.agree import agree
from distprune.collectives.base import Communicator, as_told
from distprune.collectives.communicator import Alone
from distprune.collectives.roster import Member, roster_of_one
from distprune.collectives.tensors import broadcast_tensor
from distprune.oneshot.gram import sum_gram
from distprune.oneshot.moved_rows import move_rows
from distprune.oneshot.outcome import Figures, Outcome, outcomes_of, sum_outcomes
from distprune.oneshot.retarget import Aim, has_target, retarget, target_factor
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Solved, Solver, Stage
from distprune.patterns.base import Pattern, Ranked
from distprune.scores.base import LocalScores
from distprune.shards.device import are_finite, own_settings

Clock = Callable[[str], AbstractContextManager[None]]


@own_settings()
def prune_rows(
    comm: Communicator,
    rows: Mapping[str, Rows],
    moments: list[Moments],
    clock: Clock,
    aim: Aim,
    *,
    solver: Solver[Any],
    pattern: Pattern,
) -> dict[str, Outcome]:
    """Prune ``rows`` in place, by layer, and return what became of the rows of all ranks; replicas count once.

    ``moments`` are what the solver needs, and are used up. Where they come with targets, rows are first moved there as
    ``aim`` says. Every rank must call it. Rounds: 1 of 40 bytes a layer; where inputs have owners, those of
    ``move_rows`` and its ``back()``; where some are spread, 1 of 64 bytes and 1 for each tensor that a solver sends of
    what it prepares for them, and as many for the factors (in, in) that lead to targets; 3 before (see ``sum_gram``)
    where the solver needs W^T W; and for each stage one choice of ``pattern`` for all of them.

    On a device the host waits once, and once more for each factor, where it is not for what travels to other ranks and
    for choices over rows.

    Raises:
        ValueError: on every rank: new weights are not finite.
        Exception: on every rank: what the solver raised on one. Rows may have been changed.
    """
    at_owner = [m for m in moments if not m.owner.spread]
    spread = [m for m in moments if m.owner.spread]
    moments.clear()
    moved = None
    if at_owner:
        with clock("sweep"):
            moved = move_rows(comm, rows, {name: m.owner.rank for m in at_owner for name in m.names})
            rows = moved.rows
    work = _Work(comm.rank, rows, solver, pattern, clock, aim, error=None if moved is None else moved.error)
    at_owner = [m for m in at_owner if m.owner.rank == comm.rank]
    with work.keeping_error():
        while at_owner and work.error is None:
            work.solve(Alone(), [at_owner.pop(0)])
    if spread:
        work.solve(comm, spread)
    with clock("sweep"):  # or wait for those that still do
        totals = sum_outcomes(comm, list(rows), lambda: outcomes_of(work.done()))
        if moved is not None:
            moved.back()
    return totals


@dataclass
class _Work:
    """What this rank does to its ``rows``. ``error`` is kept until ranks next communicate."""

    rank: int
    rows: Mapping[str, Rows]
    solver: Solver[Any]
    pattern: Pattern
    clock: Clock
    aim: Aim
    figures: dict[str, Figures] = field(default_factory=dict)
    error: Exception | None = None

    def solve(self, comm: Communicator, moments: list[Moments]) -> None:
        """Solve the layers of ``moments``, of which the ranks of ``comm`` hold all rows: stage by stage, side by side.

        Of each stage: the scores of all layers that have it, one choice over all ranks, which each layer then applies.
        ``moments`` are used up. Every rank of ``comm`` must call it.
        """
        self._retarget(comm, moments)
        tasks = self._prepare(comm, moments)
        with self.clock("sweep"):
            with self.keeping_error():
                for task in tasks if self.error is None else ():
                    task.pruning = self.solver.begin(task.rows, task.prepared, self.pattern)
            for stage in range(max(len(task.stages) for task in tasks)):
                some = [task for task in tasks if stage < len(task.stages)]
                roster = roster_of_one(comm, [member for task in some for member in task.members(stage)])
                scores = partial(self._scores, some, stage)
                ranked = Ranked(comm, roster, self.solver.score, scores, checks=False)
                choice = ranked.choose(some[0].stages[stage].pattern)
                with self.keeping_error():
                    self._apply(some, stage, *choice.write_masks(ranked.scores))
            with self.keeping_error():
                for task in tasks if self.error is None else ():
                    self._note(task.pruning.finish(), task.owner == self.rank)

    def _retarget(self, comm: Communicator, moments: list[Moments]) -> None:
        """Move the rows of ``moments`` to their targets, in whose place come moments without. Every rank must call it.

        The owner of an input factors what leads there, and sends it to all.
        """
        aimed = [i for i, m in enumerate(moments) if has_target(m, self.aim)]
        packed: list[list[torch.Tensor]] = []
        if comm.size > 1:
            with self.clock("target"):
                packed = self._from_owners(
                    comm,
                    [moments[i].owner.rank for i in aimed],
                    lambda i: [_meta(triangle_shape(len(moments[aimed[i]].values)))],
                    lambda i: [pack_triangle(target_factor(moments[aimed[i]], self.aim).t())],
                )
        with self.keeping_error():
            for i in range(len(moments) if self.error is None else 0):
                rows = {name: self.rows[name] for name in moments[i].names}
                if i in aimed:
                    with self.clock("target"):
                        # Of a symmetric matrix the lower half is read.
                        lower = unpack_triangle(*packed.pop(0)) if packed else target_factor(moments[i], self.aim)
                        moments[i] = retarget(rows, moments[i], self.aim, lower)
                        del lower
                with self.clock("sweep"):
                    for name, of_layer in rows.items():
                        output = moments[i].squared_output(of_layer.weight)
                        about = of_layer.name, of_layer.weight.dtype, of_layer.owned
                        self.figures[name] = Figures(*about, output)

    def _prepare(self, comm: Communicator, moments: list[Moments]) -> list[_Task]:
        """Return the tasks of ``moments``, which are used up, prepared."""
        solver, tasks = self.solver, list[_Task]()
        with self.clock("factor"):
            while moments:
                m = self._with_gram(comm, moments.pop(0))
                rows = {name: self.rows[name] for name in m.names}
                stages = solver.stages(rows[m.names[0]].num_in, self.pattern)
                tasks.append(_Task(rows, m.owner.rank, stages, m))
            packed: list[list[torch.Tensor]] = []
            if solver.sends and comm.size > 1:
                packed = self._from_owners(
                    comm,
                    [task.owner for task in tasks],
                    lambda i: solver.pack(solver.sent_like(tasks[i].first)),
                    lambda i: solver.pack(tasks[i].prepare(solver)),
                )
            with self.keeping_error():
                for task in tasks if self.error is None else ():
                    own = packed.pop(0) if packed else None
                    if own is None:
                        task.prepare(solver)
                    elif task.owner != self.rank:
                        task.prepared = solver.unpack(solver.sent_like(task.first), own, task.take_moments())
        return tasks

    def _from_owners(
        self,
        comm: Communicator,
        owners: Sequence[int],
        like: Callable[[int], list[torch.Tensor]],
        make: Callable[[int], list[torch.Tensor]],
    ) -> list[list[torch.Tensor]]:
        """Return for each i what ``make(i)`` returns on rank ``owners[i]``, in the shapes that ``like(i)`` says.

        Owners make theirs side by side. Every rank of ``comm`` must call it: 1 round of 64 bytes, and 1 of each tensor;
        none without owners.
        """
        made: list[list[torch.Tensor]] = []
        with self.keeping_error():
            device = next(iter(self.rows.values())).weight.device
            for i, owner in enumerate(owners if self.error is None else ()):
                is_own = owner == self.rank
                made.append(make(i) if is_own else [torch.empty_like(of, device=device) for of in like(i)])
        if owners:
            agree(comm, {}, self.error)
        return [
            [broadcast_tensor(comm, of, owner) for of in tensors] for owner, tensors in zip(owners, made, strict=True)
        ]

    def _with_gram(self, comm: Communicator, m: Moments) -> Moments:
        """Return ``m`` with W^T W of its rows on all ranks of ``comm``, if the solver asks for it."""
        if not self.solver.needs_gram:
            return m
        rows = [self.rows[name] for name in m.names]
        num_rows, num_in, device = sum(of.num_out for of in rows), rows[0].num_in, rows[0].weight.device

        def make() -> torch.Tensor:
            if self.error is not None:
                raise self.error
            nothing = torch.empty(0, dtype=torch.float32, device=device)
            return torch.cat([self.solver.weighed(of) for of in rows if of.owned] or [nothing])

        return dataclasses.replace(m, gram=sum_gram(comm, num_rows, num_in, make, device))

    def _scores(self, tasks: Sequence[_Task], stage: int) -> list[LocalScores]:
        """Return the scores of all layers of ``tasks``, or raise the error kept, on all ranks."""
        if self.error is not None:
            raise self.error
        return [scores for task in tasks for scores in task.pruning.scores(stage)]

    def _apply(
        self, tasks: Sequence[_Task], stage: int, masks: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]
    ) -> None:
        names = [name for task in tasks for name in task.rows]
        for name, (_, _, num_nans) in zip(names, counts, strict=True):
            self.figures[name].num_nans.append(num_nans)
        chosen = dict(zip(names, masks, strict=True))
        for task in tasks:
            task.pruning.apply(stage, [chosen[name] for name in task.rows])

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Keep what the body raises until ranks next communicate; the first error counts."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or as_told(error)

    def _note(self, solved: Mapping[str, Solved], is_owner: bool) -> None:
        for name, of in solved.items():
            weight, figures = self.rows[name].weight, self.figures[name]
            figures.solved = of if is_owner else dataclasses.replace(of, damping=0.0)
            figures.num_zeros = weight.numel() - torch.count_nonzero(weight)
            figures.is_finite = are_finite(weight)

    def done(self) -> dict[str, Figures]:
        """Return the figures of all layers, or raise what was kept. Local."""
        if self.error is not None:
            raise self.error
        return self.figures


@dataclass
class _Task:
    """Layers that share an input. ``prepared`` and ``pruning`` are the solver's, and missing after an error."""

    rows: Mapping[str, Rows]
    owner: int
    stages: Sequence[Stage]
    moments: Moments | None
    prepared: Any = None
    pruning: Any = None

    def take_moments(self) -> Moments:
        """Return the moments, which are held here no more: what was made of them takes their place."""
        moments, self.moments = self.moments, None
        assert moments is not None
        return moments

    def prepare(self, solver: Solver[Any]) -> Any:
        self.prepared = solver.prepare(self.take_moments())
        return self.prepared

    @property
    def first(self) -> Rows:
        return next(iter(self.rows.values()))

    def members(self, stage: int) -> list[Member]:
        num_columns = self.stages[stage].stop - self.stages[stage].start
        return [Member(of.name, (of.num_out, num_columns), str(of.weight.dtype)) for of in self.rows.values()]


def _meta(shape: tuple[int, int]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")
