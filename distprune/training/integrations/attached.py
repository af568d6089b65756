"""What the integrations share: sparse training that begins once a trainer has its model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, final

from torch import nn

from distprune.collectives import Group
from distprune.models import NamePattern
from distprune.patterns import Pattern, Scope
from distprune.scores import ScoreLike
from distprune.training.hold import Hold, hold_zeros
from distprune.training.optimizers import Optimizers
from distprune.training.regrowth import Regrow
from distprune.training.schedules import Schedule
from distprune.training.sparse_training import SparseTraining

__all__ = ["Attached", "Options"]


class _OfHold(TypedDict, total=False):
    include: NamePattern | Sequence[NamePattern]
    exclude: NamePattern | Sequence[NamePattern]
    group: Group


class Options(_OfHold, total=False):
    """The arguments of :class:`distprune.SparseTraining` beside the model, the optimizer and the schedule."""

    score: ScoreLike
    pattern: Pattern | str | None
    scope: Scope | None
    regrow: Regrow | None
    seed: int


@final
class Attached:
    """Sparse training that is to begin, or has begun. Without a schedule, the zeros that are there are held.

    Raises:
        TypeError: an argument that needs a schedule, and there is none.
    """

    def __init__(self, schedule: Schedule | Mapping[str, Schedule] | None, options: Options) -> None:
        without = sorted(options.keys() - _OfHold.__annotations__.keys())
        if schedule is None and without:
            raise TypeError(f"{without[0]!r} needs a schedule; without one, the zeros that are there are held")
        self._schedule, self._options = schedule, options
        self.training: SparseTraining | Hold | None = None
        self._share_at_begin = 0.0

    def begin(self, model: nn.Module, optimizer: Optimizers) -> SparseTraining | Hold:
        """Begin, as :class:`distprune.SparseTraining`, with two rounds more. Every rank must call it."""
        if self.training is not None:
            self.training.remove()
        if self._schedule is None:
            self.training = hold = hold_zeros(model, optimizer, **self._options)  # type: ignore[misc]
        else:
            self.training = SparseTraining(model, optimizer, schedule=self._schedule, **self._options)
            hold = self.training.hold
        self._share_at_begin = hold.counts().sparsity
        return self.training

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps done, the same on every rank; empty without a schedule. Local."""
        return self.training.state_dict() if isinstance(self.training, SparseTraining) else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`. Local."""
        if isinstance(self.training, SparseTraining) and state_dict:
            self.training.load_state_dict(state_dict)

    @property
    def sparsity(self) -> float:
        """The share of zeros as of the last step. Local."""
        updates = self.training.updates if isinstance(self.training, SparseTraining) else []
        return updates[-1].sparsity if updates else self._share_at_begin

    def finish(self) -> None:
        """Turn every -0.0 into 0.0, and prune and hold nothing any more. Local."""
        if self.training is not None:
            self.training.finish()
