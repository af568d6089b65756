"""What reports count: the zeros of a part, and of several together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from distprune.formatting import count, one_line, share


class Counted:
    """A part whose elements, and the zeros among them, are counted."""

    name: str
    num_elements: int
    num_zeros: int

    @property
    def sparsity(self) -> float:
        """The share of zeros."""
        return self.num_zeros / max(self.num_elements, 1)

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.sparsity)} of {count(self.num_elements)} weights zero in {self.name}")


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
