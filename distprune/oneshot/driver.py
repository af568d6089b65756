"""Runs a solver over the ranks: places rows, sends what they need, lets scores compete, and sums what was done.

Rows whose input has a home (see :mod:`distprune.calibration.homes`) are solved there, input after input. Rows whose
input is spread are solved wherever they lie, side by side, so that one choice over the ranks serves all of them.
What they need of their input is prepared by its home, where there are several; a single one by every rank.
What a solver raises on one rank is kept until ranks next communicate, and raised on all of them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from distprune.calibration import Moments
from distprune.collectives import Alone, Communicator, Member, agree, broadcast_tensor, roster_of_one
from distprune.oneshot.gram import sum_gram
from distprune.oneshot.moved_rows import move_rows
from distprune.oneshot.outcome import Outcome, sum_outcomes
from distprune.oneshot.retarget import Aim, retarget
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Solved, Solver, Solving
from distprune.patterns import Choice, Pattern, Ranked
from distprune.scores import LocalScores
from distprune.shards import all_finite

__all__ = ["Clock", "prune_rows"]

Clock = Callable[[str], AbstractContextManager[None]]

_HALFWAY = Aim()


def prune_rows(
    comm: Communicator,
    rows: Mapping[str, Rows],
    moments: list[Moments],
    solver: Solver[Any],
    pattern: Pattern,
    clock: Clock,
    aim: Aim = _HALFWAY,
) -> dict[str, Outcome]:
    """Prune ``rows`` in place, by layer, and return what became of the rows of all ranks; replicas count once.

    ``moments`` are what the solver needs, and are used up. Where they come with targets, rows are first moved there as
    ``aim`` says. Every rank must call it. Rounds: 1 of 40 bytes a layer; where inputs have homes, those of
    ``move_rows`` and its ``back()``; where several are spread, or the solver decides, 1 of 64 bytes and 1 for each of
    what is prepared for them; 2 before (see ``sum_gram``) where the solver needs W^T W; and for each stage one choice
    of ``pattern`` for all of them.

    Raises:
        ValueError: on every rank: new weights are not finite.
        Exception: on every rank: what the solver raised on one. Rows may have been changed.
    """
    at_home = [m for m in moments if not m.home.spread]
    spread = [m for m in moments if m.home.spread]
    moments.clear()
    moved = None
    if at_home:
        with clock("sweep"):
            moved = move_rows(comm, rows, {name: m.home.rank for m in at_home for name in m.names})
            rows = moved.rows
    error = None if moved is None else moved.error
    work = _Work(comm.rank, rows, solver, pattern, clock, aim, error=error)
    at_home = [m for m in at_home if m.home.rank == comm.rank]
    try:
        while at_home and work.error is None:  # what is done with is let go of
            work.solve(Alone(), [work.prepared(work.with_gram(Alone(), work.moved(at_home.pop(0))))])
        for i, m in enumerate(spread):
            spread[i] = work.moved(m)
    except Exception as caught:
        work.error = caught
    spread = [work.with_gram(comm, m) for m in spread]
    if spread:
        work.solve(comm, work.prepared_together(comm, spread))
    with clock("sweep"):  # or wait for those that still do
        totals = sum_outcomes(comm, list(rows), work.outcome)
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

    def moved(self, m: Moments) -> Moments:
        """Move the rows of ``m`` to their target, and return ``m`` without it."""
        with self.clock("target"):
            m = retarget({name: self.rows[name] for name in m.names}, m, self.aim)
        with self.clock("sweep"):
            for name in m.names:
                self.outcomes[name] = Outcome(output=m.squared_output(self.rows[name].weight))
        return m

    def with_gram(self, comm: Communicator, m: Moments) -> Moments:
        """Return ``m`` with W^T W of its rows on all ranks of ``comm``, if the solver asks for it."""
        if not self.solver.needs_gram:
            return m
        rows = [self.rows[name] for name in m.names]

        def make() -> torch.Tensor:
            if self.error is not None:
                raise self.error
            return torch.cat([self.solver.weighed(of) for of in rows if of.owned] or [torch.empty(0)])

        with self.clock("sweep"):
            num_rows = sum(of.num_out for of in rows)
            return dataclasses.replace(m, gram=sum_gram(comm, num_rows, rows[0].num_in, make))

    def prepared(self, m: Moments) -> _Input:
        """Return what the solver makes of ``m``."""
        with self.clock("factor"):
            return _Input(m.names, m.home.rank, self.solver.prepare(m))

    def prepared_together(self, comm: Communicator, spread: list[Moments]) -> list[_Input]:
        """Return what the solver makes of ``spread``, which is used up; every rank must call it."""
        sizes = [self.solver.packed_numel(self.rows[m.names[0]]) for m in spread]
        sends = any(sizes) and (len(spread) > 1 or self.solver.decides)
        inputs = [_Input(m.names, m.home.rank, None) for m in spread]
        packed: list[torch.Tensor] = []
        try:
            packed += [torch.empty(numel) for numel in sizes if sends]
            for i, of in enumerate(inputs):
                m, spread[i] = spread[i], dataclasses.replace(spread[i], values=torch.empty(0), gram=None)
                if self.error is None and (of.home == self.rank or not sends):
                    inputs[i] = self.prepared(m)
                    if sends:
                        packed[i] = self.solver.pack(inputs[i].prepared)
        except Exception as caught:
            self.error = self.error or caught
        if not sends:
            return inputs
        with self.clock("factor"):
            agree(comm, {}, self.error)
            for i, of in enumerate(inputs):
                packed[i] = broadcast_tensor(comm, packed[i], of.home)
            try:
                for i, of in enumerate(inputs):
                    rows, values = self.rows[of.names[0]], packed.pop(0)
                    if of.home != self.rank:
                        inputs[i] = _Input(of.names, of.home, self.solver.unpack(values.to(rows.weight.device), rows))
            except Exception as caught:
                self.error = caught
        return inputs

    def solve(self, comm: Communicator, inputs: Sequence[_Input]) -> None:
        """Solve the layers of ``inputs``, of which the ranks of ``comm`` hold all rows, side by side."""
        with self.clock("sweep"):
            tasks = [
                _Task(of, self.solver, {name: self.rows[name] for name in of.names}, self.pattern) for of in inputs
            ]
            keep: Callable[[], dict[str, torch.Tensor]] = dict
            for stage in range(max(len(task.stages) for task in tasks)):
                asked = [task for task in tasks if stage < len(task.stages)]
                go_on = partial(self._go_on, tasks, stage, keep)
                roster = roster_of_one(comm, [member for task in asked for member in task.members(stage)])
                choice = (
                    asked[0].stages[stage].pattern.choose(Ranked(comm, roster, self.solver.score, go_on, checks=False))
                )
                keep = partial(self._settled, [name for task in asked for name in task.rows], choice)
            try:
                self._go_on(tasks, max(len(task.stages) for task in tasks), keep)
            except Exception as error:
                self.error = error

    def _go_on(
        self, tasks: Sequence[_Task], stage: int, settle: Callable[[], dict[str, torch.Tensor]]
    ) -> list[LocalScores]:
        """Return the scores of ``stage``, of the tasks that have it; what it raises is raised on all ranks.

        ``settle`` returns what stays of the stage before.
        """
        if self.error is not None:
            raise self.error
        keep = settle()
        scores: list[LocalScores] = []
        for task in tasks:
            if stage <= len(task.stages):
                try:
                    asked = task.solving.send({name: keep[name] for name in task.rows} if stage else None)  # type: ignore[arg-type]
                    scores += asked.values()
                except StopIteration as done:
                    self._note(done.value, task.home == self.rank)
        return scores

    def _settled(self, names: Sequence[str], choice: Choice) -> dict[str, torch.Tensor]:
        chosen = dict(zip(names, choice.settle(), strict=True))
        if nans := [self.rows[name].name for name, of in chosen.items() if of.num_nans]:
            raise ValueError(f"scores are NaN in {', '.join(map(repr, nans))}; mend the values first")
        return {name: of.mask for name, of in chosen.items()}

    def _note(self, solved: Mapping[str, Solved], is_home: bool) -> None:
        for name, of in solved.items():
            rows, outcome = self.rows[name], self.outcomes[name]
            outcome.num_pruned, outcome.error, outcome.damping = of.num_pruned, of.error, of.damping if is_home else 0.0
            outcome.num_zeros = rows.weight.numel() - int(torch.count_nonzero(rows.weight))
            if not all_finite(rows.weight):
                self.error = self.error or ValueError(
                    f"the new weights of {rows.name!r} are NaN or infinite in {rows.weight.dtype}"
                )

    def outcome(self, name: str) -> Outcome:
        """Return what this rank adds to the sum over ranks, or raise what it has kept."""
        if self.error is not None:
            raise self.error
        found = self.outcomes.get(name, Outcome())
        return found if self.rows[name].owned else Outcome(damping=found.damping)


@dataclass(frozen=True)
class _Input:
    """The input of layers ``names``, and what the solver prepared for it; ``None`` after an error."""

    names: tuple[str, ...]
    home: int
    prepared: Any


class _Task:
    """Layers that share an input, on their way."""

    def __init__(self, of: _Input, solver: Solver[Any], rows: Mapping[str, Rows], pattern: Pattern) -> None:
        self.rows, self.home = rows, of.home
        self.stages = solver.stages(next(iter(rows.values())).num_in, pattern)
        self.solving: Solving = solver.prune(rows, of.prepared, pattern)

    def members(self, stage: int) -> list[Member]:
        num_columns = self.stages[stage].stop - self.stages[stage].start
        return [Member(of.name, (of.num_out, num_columns), str(of.weight.dtype)) for of in self.rows.values()]
