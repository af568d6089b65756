"""Sparse training: a schedule, a score and regrowth, tied to an optimizer. The training loop stays as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from distprune.collectives.agree import max_together
from distprune.collectives.communicator import Group, communicator
from distprune.formatting import one_line, share
from distprune.hints import with_hints
from distprune.models.find_shards import NamePattern
from distprune.patterns.as_pattern import as_pattern, says_how_much
from distprune.patterns.base import Pattern, Scope
from distprune.pruning.agreement import NamedWeights, agreeing, check_seed
from distprune.pruning.prune_model import Request, prune_requested
from distprune.scores.as_score import Movement, ScoreLike, as_score
from distprune.shards.device import fetched
from distprune.shards.local_shard import LocalShard
from distprune.shards.parameter_range import gradients_of
from distprune.training.binding import WatchedWeights, in_backward
from distprune.training.carried import laid_out, load_in_place
from distprune.training.hold import Hold
from distprune.training.optimizers import Optimizers, only_makes_state, unscaled
from distprune.training.regrowth import Regrow
from distprune.training.report import TrainingReport, Update
from distprune.training.schedules import Schedule, check_rise

_NUM_CHECKED_STEPS = 4096  # of the schedule, before anything is changed
_NO_MATTER = 5e-4  # of a share: reports say tenths of a percent


@final
class SparseTraining:
    """Prune over time, and hold what is pruned, while ``optimizer`` trains ``model``.

    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> training = SparseTraining(model, optimizer, schedule=constant(0.5))
    >>> model(torch.ones(8)).sum().backward()
    >>> optimizer.step()
    >>> training.updates[-1].sparsity
    0.5

    Before step t, counted from 0, the model is pruned in place to the share of zeros that ``schedule(t)`` says, exactly
    as :func:`distprune.prune_model` does it, if that is more than before; from the first such step on
    :func:`distprune.hold_zeros` keeps the zeros, also those that you write. Before it nothing is held.
    With ``regrow`` some of them move. Gradients are there at that time, so scores may use them.

    Args:
        model: in any layout that :func:`distprune.prune_model` takes.
        optimizer: one, several (their first counts the steps), a wrapper or a container of some.
        schedule: a function from the step to a share of zeros, such as :func:`distprune.cubic`; a mapping from names
            to such functions gives each parameter its own. With a pattern that says how much is pruned (``"2:4"``), it
            says when: at the first step where it is not 0.
        score: as in :func:`distprune.prune_model`, as are ``pattern``, ``scope``, ``seed``, ``include`` and
            ``exclude``. :class:`distprune.Movement` is summed up from the first step on.
        regrow: a :class:`Regrow`. Weights move within ``pattern``. Gradients are dense in the backward passes before a
            step at which weights grow by them, so what clips sees the norm of all, and the optimizers leave that step
            out.
        group: the ranks that hold parts of the model; all of them step together.

    The state is the number of steps, the same on every rank, and with :class:`distprune.Movement` its sums
    (:meth:`state_dict`): the zeros are in the weights. A copy (``deepcopy``, pickle) that is made together with the
    model and the optimizer trains and holds the copies; only that of the default group can be pickled.

    A step that a GradScaler skips does not count; of a fused optimizer, whose skips no rank knows of the others, it
    does, unless the zeros were to change at it: then the ranks ask each other, in a round of 8 bytes.

    Every rank of ``group`` must make it, and step. A step at which nothing changes does not communicate (at a learning
    rate of 0: one round of 16 bytes); others take the rounds of :func:`distprune.prune_model`, whatever the number of
    layers, and twice as many to regrow.

    Raises:
        ValueError, TypeError: on every rank, as :func:`distprune.hold_zeros`, or because the pattern, the score or the
            names of the schedule do not fit the model, or the schedule goes down or differs between ranks within its
            first 4,096 steps; at a step, as :func:`distprune.prune_model`.
        NotImplementedError: at a step: the optimizer steps within the backward pass, where ranks are not in step.
    """

    @with_hints
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        schedule: Schedule | Mapping[str, Schedule],
        score: ScoreLike = "magnitude",
        pattern: Pattern | str = "unstructured",
        scope: Scope | None = None,
        regrow: Regrow | None = None,
        seed: int | None = 0,
        include: NamePattern | Sequence[NamePattern] = (),
        exclude: NamePattern | Sequence[NamePattern] = (),
        group: Group = None,
    ) -> None:
        self._step = 0
        self.updates: list[Update] = []
        self.sparsities: dict[str, float] = {}  # by parameter, as of the last time that the model was pruned
        self._regrow, self._seed = regrow, seed
        self._names = [*schedule] if isinstance(schedule, Mapping) else None  # what each schedule is for
        self._schedules = [*schedule.values()] if isinstance(schedule, Mapping) else [schedule]
        self._comm = communicator(group)
        self._level = [0.0] * len(self._schedules)  # what was pruned to last
        self._movement: dict[str, torch.Tensor] = {}  # by parameter, of local shape
        levels: list[list[float]] = []
        weights = NamedWeights(model, include, exclude)
        with agreeing(self._comm) as agreed:
            if optimizer is None:
                raise TypeError("sparse training counts the steps of an optimizer; pass it")
            self._score = as_score(score)
            if unmet := {*self._score.needs} - {"gradient", "movement"}:
                raise ValueError(f"score {self._score.name!r} needs {sorted(unmet)}, which is not there while training")
            _check_callable(self._schedules)
            check_seed(seed)
            if regrow is not None and not isinstance(regrow, Regrow):
                raise TypeError(f"regrow takes a Regrow, such as Regrow(stop=1000), not {regrow!r}")
            levels += self._first_levels()
            for before, after in itertools.pairwise(levels):
                check_rise(before, after)
            self._last_checked = levels[-1]
            self._request = Request(weights, None, self._score, pattern, scope, seed)
            pruned_to = as_pattern(pattern, self._sparsity(self._last_checked), scope)
            if regrow is not None:
                pruned_to.regrowth(regrow.fraction)
            agreed.found = weights.find_for(pruned_to)
            pruned_to = as_pattern(pattern, agreed.found.by_name(self._sparsity(self._last_checked)), scope)
            agreed.facts = self._request.facts() | {"the first steps of the schedule": levels, "regrow": repr(regrow)}
        agreed.check_found()
        agreed.check_shares(pruned_to)
        self._watched = WatchedWeights(weights)
        self.hold = Hold(weights, optimizer, self._comm, listener=self._before_step, checks=any(levels[0]))
        self._prepare()

    @property
    def step(self) -> int:
        """The next step, counted from 0. If it is set, training goes on from there."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._go_on_from(step, [*map(min, self._level, self._level_before(step))])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps done, and with :class:`distprune.Movement` its sums by parameter. Local.

        The sums have their parameters' layout (DTensors, where these are), and are not copied. So
        ``torch.distributed.checkpoint`` saves them, and loads them in place at another number of ranks.

        Raises:
            NotImplementedError: sums under FSDP1, whose place no checkpoint knows.
        """
        return {"step": self.step, **({"movement": self._sums()} if isinstance(self._score, Movement) else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`; weights and optimizer are loaded as ever. Local.

        Sums of movement that are missing begin anew, with a warning.

        Raises:
            KeyError, ValueError: nothing changed: no step; sums of other parameters, or of another rank: DTensors that
                were not loaded in place, as ``torch.distributed.checkpoint`` does it.
        """
        step = int(state_dict["step"])
        if isinstance(self._score, Movement) and "movement" in state_dict:
            load_in_place(self._comm, self._sums(), state_dict["movement"], "sums of movement")
        elif isinstance(self._score, Movement):
            self._movement = {}
            if step:
                warnings.warn("the checkpoint has no sums of movement: they begin anew", stacklevel=2)
        self._go_on_from(step, self._level_before(step))

    def _level_before(self, step: int) -> list[float]:
        return self._levels(step - 1) if step else [0.0] * len(self._schedules)

    def _go_on_from(self, step: int, level: list[float]) -> None:
        """Count from ``step`` on, with weights pruned to ``level``. Before the schedule starts nothing is held."""
        self._step, self._level = step, level
        if any(self._level_before(step)):
            self.hold.begin(trusts_signs=True)
        else:
            self.hold.end()
        self.hold.expect_others()
        self._prepare()

    @override
    def __repr__(self) -> str:
        return one_line(self, f"step {self.step:,}, {share(self.report().sparsity)} zeros, {len(self.updates)} updates")

    def report(self) -> TrainingReport:
        """Return what was done so far by this object: it prints itself, and draws itself. Local."""
        return TrainingReport(tuple(self.updates), self.step)

    def remove(self) -> None:
        """Prune and hold nothing any more. Local."""
        self.hold.remove()

    def finish(self) -> TrainingReport:
        """Turn every -0.0 into 0.0, prune and hold nothing any more, and return :meth:`report`. Local.

        A warning says where the schedule goes on to more zeros than were reached.

        >>> model = torch.nn.Linear(8, 8)
        >>> SparseTraining(model, torch.optim.SGD(model.parameters()), schedule=constant(0.5)).finish()
        <TrainingReport: 0.0 % zeros after 0 steps>
        """
        self._warn_of_rest()
        self.hold.finish()
        return self.report()

    def _warn_of_rest(self) -> None:
        ahead = [self._last_checked]
        with contextlib.suppress(Exception):  # a schedule of one's own may end with the training
            ahead.append(self._levels(self.step))
        most, level = max(
            zip(map(max, *ahead, self._level), self._level, strict=True), key=lambda pair: pair[0] - pair[1]
        )
        if self.step and most - level > _NO_MATTER:
            warnings.warn(
                f"training ended after {self.step:,} steps with the schedule at {level:.4g}, and it goes on to "
                f"{most:.4g}: make more steps than it has, or let it stop earlier",
                stacklevel=3,
            )

    def _levels(self, step: int) -> list[float]:
        """Return what there is to be pruned to at ``step``; nothing moves before anything is pruned."""
        steps = [step] if self._regrow is None else [self._regrow.pruned_at(step), step]
        by_step = ([float(schedule(at)) for schedule in self._schedules] for at in steps)
        return next((levels for levels in by_step if any(levels)), [0.0] * len(self._schedules))

    def _first_levels(self) -> Iterator[list[float]]:
        for step in range(_NUM_CHECKED_STEPS):
            try:
                yield self._levels(step)
            except LookupError as error:
                raise ValueError(
                    f"the schedule has nothing for step {step} ({error!r}): it is asked for the first "
                    f"{_NUM_CHECKED_STEPS:,} steps, however many are made"
                ) from error

    def _sparsity(self, levels: Sequence[float]) -> float | Mapping[str, float] | None:
        """Return what ``levels`` of the schedules ask for, beside the pattern."""
        if says_how_much(self._request.pattern):
            return None
        return levels[0] if self._names is None else dict(zip(self._names, levels, strict=True))

    def _prepare(self) -> None:
        """Let the backward passes before a step of regrowth leave their gradients dense."""
        needs_all = self._regrow is not None and self._regrow.by == "gradient" and self._regrow.is_due(self.step)
        self.hold.leaves_gradients_dense = needs_all

    def _before_step(self, optimizer: Optimizer) -> None:
        if in_backward():
            raise NotImplementedError(
                "an optimizer that steps within the backward pass cannot prune over time, since the ranks are not in "
                "step there; prune first, and call hold_zeros"
            )
        if only_makes_state(self._comm, optimizer):
            return
        step, how = self.step, self._regrow
        levels, moves = self._levels(step), how is not None and how.is_due(step)
        if (moves or levels != self._level) and self._is_skipped(optimizer):
            return
        if isinstance(self._score, Movement):
            self._add_movement(optimizer)
        self._prune(step, levels)
        if how is not None and moves and any(self._level):
            seed = self._seed + step if how.by == "random" and self._seed is not None else None
            moved = self.hold.regrow(how.share(step), self._request.pattern, by=how.by, seed=seed)
            self.updates.append(Update(step, moved.num_held, moved.num_elements, moved.num_moved))
            if how.by == "gradient":
                self.hold.skip_step()
        self._step += 1
        self._prepare()

    def _is_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether a GradScaler lets a fused ``optimizer`` skip its step on any rank. Every rank must call it."""
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is None:
            return False

        def fill(any_overflow: torch.Tensor) -> None:
            there = [overflow] if isinstance(overflow, torch.Tensor) else []  # the int 0 without gradients
            any_overflow[0] = any(map(bool, fetched(there)))

        return bool(max_together(self._comm, (1,), fill)[0])

    def _prune(self, step: int, levels: list[float]) -> None:
        """Prune to ``levels`` at ``step``, if that is more than before."""
        check_rise(self._level, levels)
        if levels == self._level:
            return
        evidence = {name: {"movement": total} for name, total in self._movement.items()}
        request = dataclasses.replace(self._request, sparsity=self._sparsity(levels), local_evidence=evidence)
        report = prune_requested(self._comm, request)
        self.hold.begin(trusts_signs=False)
        self._level = levels
        self.sparsities = {parameter.name: parameter.sparsity for parameter in report.parameters}
        self.updates.append(Update(step, report.num_zeros, report.num_elements))

    def _add_movement(self, optimizer: Optimizer) -> None:
        shards, model = self._watched.find().shards, self._request.weights.model
        for shard, gradient in zip(shards, gradients_of(shards, model.parameters()), strict=True):
            if gradient is not None:  # else choosing says so, on all ranks
                self._sum_of(shard).addcmul_(shard.local, unscaled(gradient, optimizer).conj(), value=-1)

    def _sum_of(self, shard: LocalShard) -> torch.Tensor:
        """Return the sum of movement so far, of local shape."""
        if shard.name not in self._movement:
            dtype = torch.promote_types(shard.local.dtype, torch.float32)
            self._movement[shard.name] = torch.zeros_like(shard.local, dtype=dtype)
        return self._movement[shard.name]

    def _sums(self) -> dict[str, torch.Tensor]:
        """Return the sums of movement in their parameters' layout, zeros at first."""
        return laid_out(self._watched.find().shards, self._sum_of, "sums of movement")


def _check_callable(schedules: Sequence[object]) -> None:
    if wrong := [schedule for schedule in schedules if not callable(schedule)]:
        raise TypeError(
            "schedule takes a function from the step to the share of zeros, such as constant(0.8) or "
            f"cubic(0.8, stop=1000), or one for each name, not {wrong[0]!r}"
        )
