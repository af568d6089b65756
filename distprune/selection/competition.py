"""Which elements compete, and the state of each competition, which all ranks agree on, while it is decided."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from distprune.selection.order import Order

Words = npt.NDArray[np.int64]

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
class Range:
    """Integers from ``low`` to ``high`` inclusive, divided into equal bins, of which the last may be shorter."""

    low: int
    high: int

    def bin_width(self, num_bins: int) -> int:
        return -(-(self.high - self.low + 1) // num_bins)

    def bin(self, index: int, num_bins: int) -> Range:
        """Return the part that bin ``index`` covers."""
        width = self.bin_width(num_bins)
        low = self.low + index * width
        return Range(low, min(low + width - 1, self.high))


def add_histogram(row: torch.Tensor, values: torch.Tensor, within: Range) -> None:
    """Add the counts of ``values``, all of them inside ``within``, to the bins ``row`` (int64); all on the host."""
    width, all_values = within.bin_width(len(row)), values.numpy()
    for start in range(0, len(all_values), _HISTOGRAM_NUMEL):
        part = all_values[start : start + _HISTOGRAM_NUMEL]
        # Unsigned 64-bit arithmetic wraps, so the difference is right over the whole signed range.
        above_low = part.astype(np.int64).view(np.uint64) - np.uint64(within.low % (1 << 64))
        bins = above_low if width == 1 else above_low // np.uint64(width)
        row.numpy()[:] += np.bincount(bins.view(np.int64), minlength=len(row))


def add_histogram_on_device(row: torch.Tensor, values: torch.Tensor, within: Range, counted: torch.Tensor) -> None:
    """Add the counts of those of ``values`` that are ``counted`` (bool); no synchronization."""
    width = within.bin_width(len(row))
    above_low = values.to(torch.int64) - within.low  # wraps; read as unsigned
    bins = ((above_low >> 1) & torch.iinfo(torch.int64).max).div_(width, rounding_mode="floor").mul_(2)
    bins += (above_low - bins * width) >= width
    # What is not counted adds 0, spread over the bins: many additions to one place wait for each other.
    elsewhere = torch.arange(len(bins), device=bins.device) % len(row)
    row.scatter_add_(0, torch.where(counted, bins, elsewhere), counted.to(torch.int64))


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
    only_gone: bool = False  # no more are pruned than were before

    @property
    def is_key_known(self) -> bool:
        """Whether one key is left, and the elements below it are counted."""
        return self.keys.low == self.keys.high and not self.needs_scan

    def skip_ties(self) -> None:
        """Skip the rounds that break ties if all ties are pruned, or nothing new is."""
        if self.only_gone or self.num_before + self.num_within == self.competition.num_lowest:
            self.positions = Range(self.positions.high, self.positions.high)

    def narrow(self, within: Range, bins: Words) -> Range:
        """Return the bin of ``within`` that holds the k-th, and pass over the elements before it."""
        if within.low == within.high or self.only_gone:
            return Range(within.low, within.low)
        passed = np.cumsum(bins)
        index = int(np.searchsorted(passed, self.competition.num_lowest - self.num_before))
        self.num_within = int(bins[index])
        self.num_before += int(passed[index]) - self.num_within
        return within.bin(index, len(bins))
