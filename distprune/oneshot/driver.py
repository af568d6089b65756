"""Runs a solver over the ranks: places rows, sends what they need, lets scores compete, and sums what was done.

Rows whose input has an owner (see :mod:`distprune.calibration.owner_ranks`) are solved there, input after input. Rows
whose input is spread are solved wherever they lie, side by side, so that one choice over the ranks serves all of them.
What they need of their input is prepared by its owner, where there are several; a single one by every rank.
What a solver raises on one rank is kept until ranks next communicate, and raised on all of them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from distprune.calibration import Moments
from distprune.collectives import (
    Alone,
    Communicator,
    Member,
    agree,
    as_bytes,
    broadcast_tensor,
    from_bytes,
    roster_of_one,
    sum_together,
)
from distprune.oneshot.gram import sum_gram
from distprune.oneshot.moved_rows import move_rows
from distprune.oneshot.retarget import Aim, retarget
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Solved, Solver, Stage
from distprune.patterns import Chosen, Pattern, Ranked
from distprune.scores import LocalScores
from distprune.shards import all_finite, own_settings


@dataclass(frozen=True)
class Outcome:
    """Of one rank's rows, or of all ranks'. ``error`` is ||X (W - W')^T||^2 and ``output`` is ||X W^T||^2."""

    num_pruned: int = 0
    num_zeros: int = 0
    error: float = 0.0
    output: float = 0.0
    damping: float = 0.0

    @property
    def relative_error(self) -> float | None:
        """||X (W - W')^T|| / ||X W^T||; ``None`` where the layer puts out nothing but zeros."""
        return (max(self.error, 0.0) / self.output) ** 0.5 if self.output > 0 else None


def _sum_outcomes(comm: Communicator, names: Sequence[str], of: Callable[[str], Outcome]) -> dict[str, Outcome]:
    """Return the outcomes over all rows, by layer, of those of each rank: one round of 40 bytes a layer and 8.

    What ``of`` raises on one rank is raised on all.
    """

    def fill(words: torch.Tensor) -> None:
        outcomes = [[*vars(of(name)).values()] for name in names]
        words.copy_(torch.tensor(outcomes, dtype=torch.float64, device="cpu").view(words.shape))

    words = sum_together(comm, (len(names), len(dataclasses.fields(Outcome))), fill, torch.float64)
    return {
        name: Outcome(int(pruned), int(zeros), *others)
        for name, (pruned, zeros, *others) in zip(names, words.tolist(), strict=True)
    }


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
    ``move_rows`` and its ``back()``; where several are spread, or the solver decides, 1 of 64 bytes and 1 for each of
    what is prepared for them; 2 before (see ``sum_gram``) where the solver needs W^T W; and for each stage one choice
    of ``pattern`` for all of them.

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
        totals = _sum_outcomes(comm, list(rows), work.outcome)
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
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    error: Exception | None = None

    def solve(self, comm: Communicator, moments: list[Moments]) -> None:
        """Solve the layers of ``moments``, of which the ranks of ``comm`` hold all rows: stage by stage, side by side.

        Of each stage: the scores of all layers that have it, one choice over all ranks, which each layer then applies.
        ``moments`` are used up. Every rank of ``comm`` must call it.
        """
        with self.keeping_error():
            for i in range(len(moments)):  # no other name holds one: what is done with is let go of
                moments[i] = self._retargeted(moments[i])
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
                    self._apply(some, stage, choice.masks(ranked.scores))
            with self.keeping_error():
                for task in tasks if self.error is None else ():
                    self._note(task.pruning.finish(), task.owner == self.rank)

    def _retargeted(self, m: Moments) -> Moments:
        """Move the rows of ``m`` to their target, and return ``m`` without it."""
        with self.clock("target"):
            m = retarget({name: self.rows[name] for name in m.names}, m, self.aim)
        with self.clock("sweep"):
            for name in m.names:
                self.outcomes[name] = Outcome(output=m.squared_output(self.rows[name].weight))
        return m

    def _prepare(self, comm: Communicator, moments: list[Moments]) -> list[_Task]:
        """Return the tasks of ``moments``, which are used up, prepared."""
        sends = comm.size > 1 and self.solver.sends and (len(moments) > 1 or self.solver.decides)
        tasks: list[_Task] = []
        with self.clock("factor"):
            while moments:
                m = self._with_gram(comm, moments.pop(0))
                rows = {name: self.rows[name] for name in m.names}
                tasks.append(_Task(rows, m.owner.rank, self.solver.stages(rows[m.names[0]].num_in, self.pattern)))
                with self.keeping_error():
                    if self.error is None and (m.owner.rank == self.rank or not sends):
                        tasks[-1].prepared = self.solver.prepare(m)
            if sends:
                self._send(comm, tasks)
        return tasks

    def _send(self, comm: Communicator, tasks: Sequence[_Task]) -> None:
        """Give every rank what the owners of ``tasks`` have prepared. Every rank must call it."""
        likes: list[Any] = []
        packed: list[torch.Tensor] = []
        with self.keeping_error():
            for task in tasks:
                likes.append(self.solver.sent_like(task.first))
                if task.owner == self.rank and self.error is None:
                    packed.append(as_bytes(self.solver.pack(task.prepared)))
                else:
                    num_bytes = sum(of.nbytes for of in self.solver.pack(likes[-1]))
                    packed.append(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
        agree(comm, {}, self.error)
        for i, task in enumerate(tasks):
            packed[i] = broadcast_tensor(comm, packed[i], task.owner)
        with self.keeping_error():
            for task, like in zip(tasks, likes, strict=True):
                joined, device = packed.pop(0), task.first.weight.device
                if task.owner != self.rank:
                    parts = from_bytes(joined, self.solver.pack(like))
                    task.prepared = self.solver.unpack(like, [part.to(device) for part in parts])

    def _with_gram(self, comm: Communicator, m: Moments) -> Moments:
        """Return ``m`` with W^T W of its rows on all ranks of ``comm``, if the solver asks for it."""
        if not self.solver.needs_gram:
            return m
        rows = [self.rows[name] for name in m.names]

        def make() -> torch.Tensor:
            if self.error is not None:
                raise self.error
            nothing = torch.empty(0, dtype=torch.float32, device="cpu")
            return torch.cat([self.solver.weighed(of) for of in rows if of.owned] or [nothing])

        return dataclasses.replace(m, gram=sum_gram(comm, sum(of.num_out for of in rows), rows[0].num_in, make))

    def _scores(self, tasks: Sequence[_Task], stage: int) -> list[LocalScores]:
        """Return the scores of all layers of ``tasks``, or raise the error kept, on all ranks."""
        if self.error is not None:
            raise self.error
        return [scores for task in tasks for scores in task.pruning.scores(stage)]

    def _apply(self, tasks: Sequence[_Task], stage: int, masks: Sequence[Chosen]) -> None:
        chosen = dict(zip([name for task in tasks for name in task.rows], masks, strict=True))
        if nans := [self.rows[name].name for name, of in chosen.items() if of.num_nans]:
            raise ValueError(f"scores are NaN in {', '.join(map(repr, nans))}; mend the values first")
        for task in tasks:
            task.pruning.apply(stage, [chosen[name].mask for name in task.rows])

    @contextmanager
    def keeping_error(self) -> Iterator[None]:
        """Keep what the body raises until ranks next communicate; the first error counts."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error

    def _note(self, solved: Mapping[str, Solved], is_owner: bool) -> None:
        for name, of in solved.items():
            rows, output, damping = self.rows[name], self.outcomes[name].output, of.damping if is_owner else 0.0
            num_zeros = rows.weight.numel() - int(torch.count_nonzero(rows.weight))
            self.outcomes[name] = Outcome(of.num_pruned, num_zeros, of.error, output, damping)
            if not all_finite(rows.weight):
                raise ValueError(f"the new weights of {rows.name!r} are NaN or infinite in {rows.weight.dtype}")

    def outcome(self, name: str) -> Outcome:
        """Return what this rank adds to the sum over ranks, or raise what it has kept."""
        if self.error is not None:
            raise self.error
        found = self.outcomes.get(name, Outcome())
        return found if self.rows[name].owned else Outcome(damping=found.damping)


@dataclass
class _Task:
    """Layers that share an input. ``prepared`` and ``pruning`` are the solver's, and missing after an error."""

    rows: Mapping[str, Rows]
    owner: int
    stages: Sequence[Stage]
    prepared: Any = None
    pruning: Any = None

    @property
    def first(self) -> Rows:
        return next(iter(self.rows.values()))

    def members(self, stage: int) -> list[Member]:
        num_columns = self.stages[stage].stop - self.stages[stage].start
        return [Member(of.name, (of.num_out, num_columns), str(of.weight.dtype)) for of in self.rows.values()]
