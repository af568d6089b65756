"""Which elements compete, and the standings of all competitions, which all ranks agree on, while they are decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from distprune.selection.order import Order

Words = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.signedinteger]

_HISTOGRAM_NUMEL = 1 << 16  # values at a time: the temporaries of one part are used again for the next


@dataclass(frozen=True)
class Competition:
    """Elements that compete with each other; the ``num_lowest`` of ``num_positions`` are pruned.

    Both count the elements of all its parameters over all ranks. Gone elements are counted and are pruned first.
    """

    name: str
    order: Order
    num_positions: int
    num_lowest: int


@dataclass(frozen=True)
class Ranges:
    """Integers from ``low`` to ``high`` inclusive, one range a competition, each divided into equal bins.

    The last bins of a range may be shorter, or empty. Differences are unsigned: those of int64 may not fit into int64.
    """

    low: Words
    high: Words

    @staticmethod
    def of(bounds: Sequence[tuple[int, int]]) -> Ranges:
        low, high = np.array(bounds, dtype=np.int64).reshape(-1, 2).T.copy()
        return Ranges(low, high)

    @property
    def largest(self) -> int:
        """The number of integers in the largest."""
        return int(self._extents.max()) + 1

    @property
    def are_one(self) -> Flags:
        """Which hold one integer."""
        are_one: Flags = np.equal(self.low, self.high)
        return are_one

    def at(self, places: Words | Flags) -> Ranges:
        """Return a copy of the ranges at ``places``."""
        return Ranges(self.low[places], self.high[places])

    def put(self, places: Words | Flags, ranges: Ranges) -> None:
        """Replace the ranges at ``places``."""
        self.low[places], self.high[places] = ranges.low, ranges.high

    def widths(self, num_bins: int) -> npt.NDArray[np.uint64]:
        """Return the width of the bins of each."""
        return self._extents // np.uint64(num_bins) + np.uint64(1)

    def bins(self, first: Words, last: Words, num_bins: int) -> Ranges:
        """Return what the bins from ``first`` to ``last`` inclusive cover of each."""
        widths = self.widths(num_bins)
        begin, end = (np.minimum(index.astype(np.uint64), self._extents // widths) * widths for index in (first, last))
        end += np.minimum(widths - np.uint64(1), self._extents - end)
        return Ranges(self.low + begin.view(np.int64), self.low + end.view(np.int64))

    def hold(self, values: Words | Keys, of: Keys | None) -> Flags:
        """Return which of ``values`` are inside of their ranges: see :func:`add_histogram`."""
        inside: Flags = np.empty(len(values), dtype=np.bool_)
        for start in range(0, len(values), _HISTOGRAM_NUMEL):
            at = slice(start, start + _HISTOGRAM_NUMEL)
            place = 0 if of is None else of[at]
            np.logical_and(values[at] >= self.low[place], values[at] <= self.high[place], out=inside[at])
        return inside

    @property
    def _extents(self) -> npt.NDArray[np.uint64]:
        return (self.high - self.low).view(np.uint64)


def add_histogram(bins: Words, values: Words | Keys, of: Keys | None, within: Ranges, weight: int = 1) -> None:
    """Add the counts of ``values``, each inside of its range, to ``bins`` (competitions, bins); all on the host.

    ``of``: the competition of each value; ``None``: there is one.
    """
    num_bins, flat = bins.shape[1], bins.reshape(-1)
    widths = within.widths(num_bins)
    for start in range(0, len(values), _HISTOGRAM_NUMEL):
        part = values[start : start + _HISTOGRAM_NUMEL].astype(np.int64)
        place = 0 if of is None else of[start : start + _HISTOGRAM_NUMEL]
        above_low = (part - within.low[place]).view(np.uint64)
        if of is not None or widths[0] != 1:
            above_low //= widths[place]
        counted = above_low.view(np.int64)
        if of is not None:
            counted += place * num_bins
        flat += np.bincount(counted, minlength=len(flat)) * weight


class Standings:
    """What the ranks know of every competition: its k-th lowest element is in ``keys``, then in ``positions``.

    ``num_before`` elements precede the range that is left, ``num_within`` are in it. Every rank holds the same values,
    since they come from reduced counts alone.
    """

    def __init__(self, competitions: Sequence[Competition]) -> None:
        self.competitions = competitions
        self.num_lowest = np.array([each.num_lowest for each in competitions], dtype=np.int64)
        self.num_positions = np.array([each.num_positions for each in competitions], dtype=np.int64)
        self.all_keys = Ranges.of([(each.order.first, each.order.last) for each in competitions])
        self.keys = self.all_keys.at(np.arange(len(competitions)))
        self.positions = Ranges(np.zeros_like(self.num_positions), np.maximum(self.num_positions - 1, 0))
        self.num_before = np.zeros_like(self.num_positions)
        self.num_within = self.num_positions.copy()
        self.needs_scan = np.ones(len(competitions), dtype=np.bool_)
        self.only_gone = np.zeros(len(competitions), dtype=np.bool_)  # no more are pruned than were before

    @cached_property
    def key_dtype(self) -> np.dtype[np.signedinteger]:
        """The dtype that holds the keys of all competitions."""
        sizes = {each.order.key_dtype.itemsize for each in self.competitions}
        return np.dtype(f"i{max(sizes, default=8)}")

    @property
    def without_key(self) -> Words:
        """The competitions of which several elements with several keys are left, or those below are not counted."""
        several = ~self.keys.are_one & (self.num_within > 1)
        return np.flatnonzero(~self.only_gone & (self.needs_scan | several))

    @property
    def with_one_element(self) -> Words:
        """The competitions in whose range of several keys one element is left."""
        return np.flatnonzero(~self.only_gone & ~self.needs_scan & ~self.keys.are_one)

    @property
    def with_ties(self) -> Words:
        """The competitions, of known keys, of which more than one position is left."""
        return np.flatnonzero(~self.positions.are_one)

    def narrow_keys(self, of: Words, bins: Words, below: Words) -> None:
        """Take over one round of counts of the competitions ``of``; where the bracket missed, go on beside it."""
        scanned, k, keys = self.needs_scan[of], self.num_lowest[of], self.keys.at(of)
        num_inside = bins.sum(1)
        missed_below, missed_above = scanned & (k <= below), scanned & (k > below + num_inside)
        everything = self.all_keys.at(of)
        is_gone = missed_below & (keys.low == everything.low)
        missed_below &= ~is_gone
        self.only_gone[of[is_gone]] = True
        low = Ranges(everything.low, keys.low - 1)
        high = Ranges(keys.high + 1, everything.high)
        for missed, beside in ((missed_below, low), (missed_above, high)):
            self.keys.put(of[missed], beside.at(missed))
        hit = ~(is_gone | missed_below | missed_above)
        self.num_before[of] += np.where(hit & scanned, below, 0)
        self.needs_scan[of[hit]] = False
        self._narrow(self.keys, of[hit], bins[hit])

    def narrow_positions(self, of: Words, bins: Words) -> None:
        """Take over one round of counts of the competitions ``of``."""
        self._narrow(self.positions, of, bins)

    def stuck(self, of: Words, num_within: Words, num_bins: int) -> Words:
        """Return which of ``of`` a count left all ``num_within`` elements, in a range too large for two counts more.

        They are ties, or lie close together: their lowest and highest say more than another count.
        """
        counted = ~self.needs_scan[of] & (self.num_within[of] == num_within)
        are_large = self.keys.at(of)._extents >= np.uint64(num_bins) ** np.uint64(2)
        return np.intersect1d(of[counted & are_large], self.without_key)

    def skip_ties(self) -> None:
        """Skip the rounds that break ties where all ties are pruned, or nothing new is."""
        skipped = self.only_gone | (self.num_before + self.num_within == self.num_lowest)
        self.positions.low[skipped] = self.positions.high[skipped]

    def _narrow(self, ranges: Ranges, of: Words, bins: Words) -> None:
        """Keep the bins that hold the k-th, and pass over the elements before them."""
        passed = self.num_before[of, None] + np.cumsum(bins, axis=1)
        index = (passed < self.num_lowest[of, None]).sum(1)
        self.num_within[of] = num_within = np.take_along_axis(bins, index[:, None], 1)[:, 0]
        self.num_before[of] = np.take_along_axis(passed, index[:, None], 1)[:, 0] - num_within
        ranges.put(of, ranges.at(of).bins(index, index, bins.shape[1]))
