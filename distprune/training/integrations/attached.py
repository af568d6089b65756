"""What the integrations share: sparse training that begins once a trainer has its model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from torch import nn

from distprune.collectives.communicator import Group
from distprune.models.find_shards import NamePattern, listed
from distprune.patterns.base import Pattern, Scope
from distprune.scores.as_score import ScoreLike
from distprune.training.hold import Hold, hold_zeros
from distprune.training.optimizers import Optimizers
from distprune.training.regrowth import Counts, Regrow
from distprune.training.schedules import Schedule
from distprune.training.sparse_training import SparseTraining

__all__ = ["Attached", "Options"]


class Options(TypedDict, total=False):
    """The arguments of :class:`distprune.SparseTraining` beside the model, the optimizer and the schedule."""

    include: NamePattern | Sequence[NamePattern]
    exclude: NamePattern | Sequence[NamePattern]
    group: Group
    score: ScoreLike
    pattern: Pattern | str
    scope: Scope | None
    regrow: Regrow | None
    seed: int | None


class Attached:
    """Sparse training that is to begin, or has begun, and what the callbacks of trainers have in common.

    Without a schedule, the zeros that are there are held.

    Raises:
        TypeError: an argument that needs a schedule, and there is none.
    """

    def __init__(
        self,
        schedule: Schedule | Mapping[str, Schedule] | None = None,
        *,
        log_parameters: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        without = sorted(options.keys() - {"include", "exclude", "group"})
        if schedule is None and without:
            raise TypeError(f"{without[0]!r} needs a schedule; without one, the zeros that are there are held")
        for name in options.keys() & {"include", "exclude"}:  # it may begin several times
            options[name] = listed(options[name])  # type: ignore[literal-required]
        self._schedule, self._options, self._logs_parameters = schedule, options, log_parameters
        self.training: SparseTraining | Hold | None = None  # what prunes and holds, or held, what was trained last
        self._at_begin: dict[str, Counts] = {}
        self._told: dict[str, float] = {}

    def begin(self, model: nn.Module, optimizer: Optimizers, *, loads_later: bool = False) -> SparseTraining | Hold:
        """Begin, as :class:`distprune.SparseTraining`, with two rounds more. Every rank must call it.

        ``loads_later``: zeros may come with a checkpoint, after it has begun.

        Raises:
            ValueError: on every rank: there is neither a schedule nor a zero, so training would be dense.
        """
        if self.training is not None:
            self.training.remove()
        if self._schedule is None:
            self.training = hold = hold_zeros(model, optimizer, **self._options)  # type: ignore[misc]
        else:
            self.training = SparseTraining(model, optimizer, schedule=self._schedule, **self._options)
            hold = self.training.hold
        self._at_begin, self._told = hold.counts_by_name(), {}
        if self._schedule is None and not loads_later and not any(c.num_held for c in self._at_begin.values()):
            hold.remove()
            raise ValueError(
                "there is neither a schedule nor a zero in the model, so training would be dense: give a schedule, or "
                "prune the model first"
            )
        return self.training

    @property
    def sparsity(self) -> float:
        """The share of zeros as of the last step. Local."""
        if isinstance(self.training, SparseTraining) and self.training.updates:
            return self.training.updates[-1].sparsity
        counts = self._at_begin.values()
        return sum(count.num_held for count in counts) / max(sum(count.num_elements for count in counts), 1)

    def news(self) -> dict[str, float]:
        """Return the share of zeros of each parameter, to be logged, if it is not as it was returned last. Local."""
        now = self.training.sparsities if isinstance(self.training, SparseTraining) else {}
        now = now or {name: counts.sparsity for name, counts in self._at_begin.items()}
        if now == self._told or not self._logs_parameters:
            return {}
        self._told = now
        return {f"sparsity/{name}": share for name, share in now.items()}
