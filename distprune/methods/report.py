"""What a pruning call did, in numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = ["ParameterReport", "PruneReport"]


@dataclass(frozen=True)
class ParameterReport:
    """One parameter, counted over all ranks, replicas once."""

    name: str
    num_elements: int
    num_pruned: int  # by this call
    num_zeros: int  # in all, after it
    threshold: float | None  # the score of the last element pruned among its competitors


@dataclass(frozen=True)
class PruneReport:
    """The same on every rank, but for ``seconds``."""

    method: str
    scope: str
    amount: int | float
    seed: int | None
    parameters: tuple[ParameterReport, ...]
    num_rounds: int  # of communication, this call
    num_bytes: int  # of messages per rank, this call
    seconds: float

    @property
    def num_elements(self) -> int:
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def num_pruned(self) -> int:
        return sum(parameter.num_pruned for parameter in self.parameters)

    @property
    def num_zeros(self) -> int:
        return sum(parameter.num_zeros for parameter in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, totals included, as JSON carries it."""
        totals = {name: getattr(self, name) for name in ("num_elements", "num_pruned", "num_zeros")}
        return {**dataclasses.asdict(self), **totals}
