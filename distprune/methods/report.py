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
    # The score of the last element, or block, pruned among its competitors; None: none, or one for each group or row.
    threshold: float | None


@dataclass(frozen=True)
class PruneReport:
    """The same on every rank, but for ``seconds`` and, where shard edges cut groups or blocks, ``num_bytes``."""

    method: str
    scope: str | None  # None: nothing competes beyond a group or a row
    amount: int | float | None  # None: what an N:M pattern says
    pattern: str | None  # as it is written; None: one by one, as scope and amount say
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
