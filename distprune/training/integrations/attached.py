"""What the integrations share: sparse training that begins once a trainer has its model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack, final

from torch import nn

from distprune.collectives.communicator import Group
from distprune.models.find_shards import NamePattern
from distprune.patterns.base import Pattern, Scope
from distprune.scores.as_score import ScoreLike
from distprune.training.hold import Hold, hold_zeros
from distprune.training.optimizers import Optimizers
from distprune.training.regrowth import Counts, Regrow
from distprune.training.schedules import Schedule
from distprune.training.sparse_training import SparseTraining

__all__ = ["Attached", "AttachedCallback", "Options"]


_FOR_HOLDING = {"include", "exclude", "group"}


class Options(TypedDict, total=False):
    """The arguments of :class:`distprune.SparseTraining` beside the model, the optimizer and the schedule."""

    include: NamePattern | Sequence[NamePattern]
    exclude: NamePattern | Sequence[NamePattern]
    group: Group
    score: ScoreLike
    pattern: Pattern | str
    scope: Scope | None
    regrow: Regrow | None
    seed: int


@final
class Attached:
    """Sparse training that is to begin, or has begun. Without a schedule, the zeros that are there are held.

    ``loads_later``: zeros may come with a checkpoint, after it has begun. ``by_parameter``: there is :meth:`news`.

    Raises:
        TypeError: an argument that needs a schedule, and there is none.
    """

    def __init__(
        self,
        schedule: Schedule | Mapping[str, Schedule] | None,
        options: Options,
        *,
        loads_later: bool = False,
        by_parameter: bool = True,
    ) -> None:
        without = sorted(options.keys() - _FOR_HOLDING)
        if schedule is None and without:
            raise TypeError(f"{without[0]!r} needs a schedule; without one, the zeros that are there are held")
        self._schedule, self._options, self._loads_later = schedule, options, loads_later
        self._by_parameter = by_parameter
        self.training: SparseTraining | Hold | None = None
        self._at_begin: dict[str, Counts] = {}
        self._told: dict[str, float] = {}

    def begin(self, model: nn.Module, optimizer: Optimizers) -> SparseTraining | Hold:
        """Begin, as :class:`distprune.SparseTraining`, with two rounds more. Every rank must call it.

        Raises:
            ValueError: on every rank: there is neither a schedule nor a zero, so training would be dense.
        """
        if self.training is not None:
            self.training.remove()
        if self._schedule is None:
            self.training = hold_zeros(model, optimizer, **self._options)  # type: ignore[misc]
        else:
            self.training = SparseTraining(model, optimizer, schedule=self._schedule, **self._options)
        hold = self.hold
        assert hold is not None  # it has just begun
        self._at_begin, self._told = hold.counts_by_name(), {}
        if self._schedule is None and not self._loads_later and not any(c.num_held for c in self._at_begin.values()):
            hold.remove()
            raise ValueError(
                "there is neither a schedule nor a zero in the model, so training would be dense: give a schedule, or "
                "prune the model first"
            )
        return self.training

    @property
    def hold(self) -> Hold | None:
        """What holds the zeros, once it has begun."""
        return self.training.hold if isinstance(self.training, SparseTraining) else self.training

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps done, the same on every rank; empty without a schedule. Local."""
        return {"step": self.training.step} if isinstance(self.training, SparseTraining) else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`. Local."""
        if isinstance(self.training, SparseTraining) and state_dict:
            self.training.load_state_dict(state_dict)

    @property
    def sparsity(self) -> float:
        """The share of zeros as of the last step. Local."""
        updates = self.training.updates if isinstance(self.training, SparseTraining) else []
        if updates:
            return updates[-1].sparsity
        counts = self._at_begin.values()
        return sum(each.num_held for each in counts) / max(sum(each.num_elements for each in counts), 1)

    def news(self) -> dict[str, float]:
        """Return the share of zeros of each parameter, to be logged, if it is not as it was returned last. Local."""
        now = self.training.sparsities if isinstance(self.training, SparseTraining) else {}
        now = now or {name: counts.sparsity for name, counts in self._at_begin.items()}
        if now == self._told or not self._by_parameter:
            return {}
        self._told = now
        return {f"sparsity/{name}": share for name, share in now.items()}

    def finish(self) -> None:
        """Turn every -0.0 into 0.0, and prune and hold nothing any more. Local."""
        if self.training is not None:
            self.training.finish()


class AttachedCallback:
    """What the callbacks of trainers share: their arguments, and what they begin."""

    def __init__(
        self,
        schedule: Schedule | Mapping[str, Schedule] | None = None,
        *,
        log_parameters: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        self._attached = Attached(schedule, options, by_parameter=log_parameters)

    @property
    def training(self) -> SparseTraining | Hold | None:
        """What prunes and holds, or held, the model that was trained last."""
        return self._attached.training
