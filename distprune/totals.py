"""What reports of several counted parts add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Totals:
    """The totals over ``counted`` parts, whose elements, and the zeros among them, are counted."""

    @property
    def counted(self) -> Sequence[Any]:
        """The parts that count."""
        raise NotImplementedError

    @property
    def num_elements(self) -> int:
        return sum(part.num_elements for part in self.counted)

    @property
    def num_zeros(self) -> int:
        return sum(part.num_zeros for part in self.counted)

    @property
    def sparsity(self) -> float:
        """The share of zeros of what was counted."""
        return self.num_zeros / max(self.num_elements, 1)
