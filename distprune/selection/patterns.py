"""Which weights compete with each other, and how many of them go: small values."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Block", "NByM", "Pattern", "PerRow", "Unstructured", "check_divides", "check_pattern"]


@dataclass(frozen=True)
class _Fraction:
    amount: float

    def __post_init__(self) -> None:
        _check_fraction(self.amount)


@dataclass(frozen=True)
class Unstructured(_Fraction):
    """The fraction ``amount`` of all weights that compete, weight by weight.

    Those are a parameter's, or with ``scope="global"`` all parameters'; in one-shot pruning a matrix's, except
    where a method's paper has it otherwise. Wanda: within each row (arXiv 2306.11695, section 3), as
    :class:`PerRow`. SparseGPT: within each block of 128 columns, over all rows (arXiv 2301.00774, section
    3.3). Counts are rounded by ``round()``.

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
class Block:
    """The fraction ``amount`` of the blocks of ``size`` x ``size`` weights; a block's score is the sum of its weights'.

    The blocks of a parameter compete, or with ``scope="global"`` those of all parameters.

    Raises:
        TypeError: ``size`` is no int, or ``amount`` no number.
        ValueError: ``size`` is less than 1, or not 0 < ``amount`` < 1.
    """

    size: int
    amount: float

    def __post_init__(self) -> None:
        _check_count("size", self.size)
        if self.size < 1:
            raise ValueError(f"size={self.size} is no size of a block")
        _check_fraction(self.amount)


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
        _check_count("n", self.n)
        _check_count("m", self.m)
        if not 0 < self.n < self.m:
            raise ValueError(f"{self.n}:{self.m} is no pattern: n of every m are kept, 0 < n < m")


Pattern: TypeAlias = Unstructured | PerRow | Block | NByM


def check_pattern(pattern: object) -> None:
    """Raise a TypeError if ``pattern`` is none. Local."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be Unstructured, PerRow, Block or NByM, not {pattern!r}")


def check_divides(pattern: Pattern, name: str, num_out: int, num_in: int) -> None:
    """Raise a ValueError that names ``name`` if ``pattern`` cannot group its (num_out, num_in) weights. Local."""
    if isinstance(pattern, NByM) and num_in % pattern.m:
        raise ValueError(
            f"{pattern.n}:{pattern.m} does not fit {name!r}: its {num_in} inputs are no multiple of {pattern.m}"
        )
    if isinstance(pattern, Block) and (num_in % pattern.size or num_out % pattern.size):
        raise ValueError(
            f"blocks of {pattern.size} x {pattern.size} do not fit {name!r}: {num_out} x {num_in} weights are no "
            "multiple of them"
        )


def _check_count(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an int, not {number!r}")


def _check_fraction(amount: object) -> None:
    if isinstance(amount, bool) or not isinstance(amount, numbers.Real):
        raise TypeError(f"amount must be a fraction, not {amount!r}")
    if not 0 < float(amount) < 1:
        raise ValueError(f"amount={amount} is not between 0 and 1, both excluded; it is the fraction that is pruned")
