"""Who competes with whom, and the agreed state of each competition while it is being decided."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distprune.selection.order import Order

__all__ = ["Competition", "Range", "Undecided", "histogram"]

Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Competition:
    """Elements that compete with each other; ``num_lowest`` of the ``num_eligible`` are pruned.

    ``num_positions`` counts the elements of all its parameters over all ranks, eligible or not.
    """

    name: str
    order: Order
    num_positions: int
    num_eligible: int
    num_lowest: int


@dataclass(frozen=True)
class Range:
    """Integers from ``low`` to ``high`` (both in), counted in equal bins, the last one shorter."""

    low: int
    high: int

    def bin_width(self, num_bins: int) -> int:
        return -(-(self.high - self.low + 1) // num_bins)

    def bin(self, index: int, num_bins: int) -> Range:
        """Return the part that bin ``index`` covers."""
        width = self.bin_width(num_bins)
        low = self.low + index * width
        return Range(low, min(low + width - 1, self.high))


def histogram(values: npt.NDArray[np.signedinteger], within: Range, num_bins: int) -> Words:
    """Count ``values``, all of them inside ``within``, in its bins (int64, ``num_bins`` long)."""
    # Unsigned 64-bit arithmetic wraps, so the difference is right over the whole signed range.
    above_low = values.astype(np.int64).view(np.uint64) - np.uint64(within.low % (1 << 64))
    width = within.bin_width(num_bins)
    bins = above_low if width == 1 else above_low // np.uint64(width)
    return np.bincount(bins.view(np.int64), minlength=num_bins).astype(np.int64, copy=False)


@dataclass
class Undecided:
    """What the ranks know of one competition: its k-th lowest element is in ``keys``, then in ``positions``.

    ``num_before`` elements precede the range that is left, ``num_within`` are in it. Every rank holds the
    same values, since they come from reduced counts alone.
    """

    competition: Competition
    keys: Range
    positions: Range
    num_before: int = 0
    num_within: int = 0
    needs_scan: bool = True

    @property
    def is_key_known(self) -> bool:
        """Whether one key is left, and the elements below it are counted."""
        return self.keys.low == self.keys.high and not self.needs_scan

    def settle_ties(self) -> None:
        """Leave no choice of positions where none has to be made: all that tie with the k-th go, or nothing does."""
        if self.num_before + self.num_within == self.competition.num_lowest or self.competition.num_lowest == 0:
            self.positions = Range(self.positions.high, self.positions.high)

    def narrow(self, within: Range, bins: Words) -> Range:
        """Return the bin of ``within`` that holds the k-th, and pass over the elements before it."""
        if within.low == within.high or self.competition.num_lowest == 0:
            return Range(within.low, within.low)
        passed = np.cumsum(bins)
        index = int(np.searchsorted(passed, self.competition.num_lowest - self.num_before))
        self.num_within = int(bins[index])
        self.num_before += int(passed[index]) - self.num_within
        return within.bin(index, len(bins))
