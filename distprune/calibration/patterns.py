"""Which weights of a linear map compete with each other, and how many of them go."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from distprune.calibration.linear_maps import LinearMap

__all__ = ["NByM", "Pattern", "PerRow", "Unstructured", "check_divides"]


@dataclass(frozen=True)
class _Fraction:
    amount: float

    def __post_init__(self) -> None:
        _check_fraction(self.amount)


@dataclass(frozen=True)
class Unstructured(_Fraction):
    """The fraction ``amount`` of every matrix, competing as the method's paper has it.

    Magnitude and random: over the whole matrix. Wanda: within each row (arXiv 2306.11695, section 3), as
    :class:`PerRow`. SparseGPT: within each block of 128 columns, over all rows (arXiv 2301.00774,
    section 3.3). Counts are rounded by ``round()``.

    Raises:
        TypeError: ``amount`` is no number.
        ValueError: not 0 < ``amount`` < 1.
    """


@dataclass(frozen=True)
class PerRow(_Fraction):
    """``round(amount * in)`` of every row (output) of a matrix; SparseGPT spreads them evenly over its column blocks.

    Raises:
        TypeError: ``amount`` is no number.
        ValueError: not 0 < ``amount`` < 1.
    """


@dataclass(frozen=True)
class NByM:
    """``n`` of every ``m`` consecutive inputs are kept.

    Raises:
        TypeError: ``n`` or ``m`` is no int.
        ValueError: not 0 < ``n`` < ``m``.
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        for name, number in (("n", self.n), ("m", self.m)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise TypeError(f"{name} must be an int, not {number!r}")
        if not 0 < self.n < self.m:
            raise ValueError(f"{self.n}:{self.m} is no pattern: n of every m are kept, 0 < n < m")


Pattern: TypeAlias = Unstructured | PerRow | NByM


def check_divides(pattern: Pattern, maps: Mapping[str, LinearMap]) -> None:
    """Raise a ValueError that names the first of ``maps`` whose inputs ``pattern`` cannot group. Local."""
    if not isinstance(pattern, NByM):
        return
    for name, linear in maps.items():
        if linear.num_in % pattern.m:
            raise ValueError(
                f"{pattern.n}:{pattern.m} does not fit {name!r}: its {linear.num_in} inputs are no multiple of "
                f"{pattern.m}"
            )


def _check_fraction(amount: object) -> None:
    if isinstance(amount, bool) or not isinstance(amount, numbers.Real):
        raise TypeError(f"amount must be a fraction, not {amount!r}")
    if not 0 < float(amount) < 1:
        raise ValueError(f"amount={amount} is not between 0 and 1, both excluded; it is the fraction that is pruned")
