"""A round of counts: some for each of several competitions, summed over ranks in a message of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from distprune.collectives.agree import max_together, sum_together
from distprune.collectives.base import Communicator
from distprune.selection.competition import Keys, Ranges, Words, add_histogram

_NUM_WORDS = 1 << 13  # of 8 bytes that all competitions share in a round: 64 KiB
_MOST_BINS = 1 << 13  # of one competition
_LEAST = 3  # words of one competition, however many there are
NO_END = torch.iinfo(torch.int64).min  # no key is, or less one

Wanted = Literal["counts", "sum", "ends"]


class BinCounts:
    """Counts of the competitions ``left`` of ``num``: of elements in bins of the ranges ``within``, one of each.

    ``bins``: (left, columns). ``beyond``: how many are below the range and above it, (left, 2). ``num_nans``: in all.
    ``wanted``: in the place of counts the bins may have the sum of the elements, which is the element itself where one
    is left; or, in two columns, less the lowest and the highest. ``nothing``: what a bin begins with.
    """

    def __init__(self, num: int, left: Words, within: Ranges, num_columns: int, *, wanted: Wanted = "counts") -> None:
        self.wanted = wanted
        self.nothing = NO_END if wanted == "ends" else 0
        self.bins = np.full((len(left), num_columns), self.nothing, dtype=np.int64)
        self.beyond = np.zeros((len(left), 2), dtype=np.int64)
        self.num_nans = 0
        self.within = within
        self.rows = np.full(num, -1)
        self.rows[left] = np.arange(len(left))

    def has(self, competition: int) -> bool:
        """Return whether ``competition`` is counted."""
        return bool(self.rows[competition] >= 0)

    def of(self, competition: int) -> Ranges:
        """Return the range of one competition that is counted."""
        return self.within.at(self.rows[competition, None])

    def add(self, values: Keys | Words, of: Keys | int | None, weight: int = 1) -> None:
        """Add ``values``, inside of their ranges: all of one competition, or ``of`` several; ``None``: of the first.

        Those of competitions that are not counted are left out.
        """
        if of is None or isinstance(of, int):
            row = int(self.rows[of or 0])
            if row < 0 or not len(values):
                return
            if self.wanted == "sum":
                self.bins[row] += values.sum(dtype=np.int64)
            elif self.wanted == "ends":
                np.maximum(self.bins[row], (-int(values.min()), int(values.max())), out=self.bins[row])
            else:
                add_histogram(self.bins[row : row + 1], values, None, self.of(of or 0), weight)
            return
        rows = self.rows[of]
        counted = rows >= 0
        rows, values = rows[counted], values[counted]
        if self.wanted == "sum":
            np.add.at(self.bins[:, 0], rows, values)
        elif self.wanted == "ends":
            np.maximum.at(self.bins[:, 0], rows, -values.astype(np.int64))
            np.maximum.at(self.bins[:, 1], rows, values)
        else:
            add_histogram(self.bins, values, rows, self.within, weight)

    def take(self, fetched: Words) -> None:
        """Add the bins that were counted elsewhere."""
        (np.maximum if self.wanted == "ends" else np.add)(self.bins, fetched, out=self.bins)


def summed_counts(
    comm: Communicator,
    num: int,
    left: Words,
    within: Ranges,
    most: int,
    count: Callable[[BinCounts], None],
    *,
    with_beyond: bool = False,
) -> BinCounts:
    """Return the sum over ranks of what ``count`` adds to the counts of the competitions ``left`` of ``num``.

    There are as many bins, 8,192 at most, as fit into a message of 64 KiB, or into 24 bytes a competition if that is
    more. No sum is more than ``most``: then several counts share a word. ``with_beyond``: what is beyond the
    ranges is counted too. Every rank must call it: one round. What ``count`` raises on one rank is raised on all.
    """
    num_rows, num_extra, bits = len(left), 2 if with_beyond else 0, min(most.bit_length() + 1, 63)
    per_word = 63 // bits  # a bit more than is needed: so that counts which are wrong are seen to be
    most_words = max(_NUM_WORDS // num_rows, _LEAST)
    num_columns = min(most_words * per_word - num_extra, _MOST_BINS, within.largest)
    num_words = -(-(num_columns + num_extra) // per_word)
    shifts = bits * np.arange(per_word)

    def packed(message: torch.Tensor) -> None:
        own = BinCounts(num, left, within, num_columns)
        count(own)
        padded = np.zeros((num_rows, num_words * per_word), dtype=np.int64)
        padded[:, :num_columns] = own.bins
        padded[:, num_columns : num_columns + num_extra] = own.beyond[:, :num_extra]
        message[:-1] = torch.from_numpy((padded.reshape(-1, per_word) << shifts).sum(1))
        message[-1] = own.num_nans

    message = sum_together(comm, (num_rows * num_words + 1,), packed).numpy()
    unpacked = (message[:-1, None] >> shifts) & np.int64((1 << bits) - 1)
    columns = unpacked.reshape(num_rows, -1)
    summed = BinCounts(num, left, within, num_columns)
    summed.bins, summed.num_nans = columns[:, :num_columns], int(message[-1])
    summed.beyond[:, :num_extra] = columns[:, num_columns : num_columns + num_extra]
    return summed


def summed_values(
    comm: Communicator, num: int, left: Words, within: Ranges, count: Callable[[BinCounts], None]
) -> Words:
    """Return the one element that each of the ranges ``within`` holds: one round of 8 bytes a competition.

    As :func:`summed_counts`, of competitions in whose range one element is left over all ranks.
    """

    def filled(message: torch.Tensor) -> None:
        own = BinCounts(num, left, within, 1, wanted="sum")
        count(own)
        message.copy_(torch.from_numpy(own.bins[:, 0]))

    values: Words = sum_together(comm, (len(left),), filled).numpy()
    return values


def told_ends(comm: Communicator, num: int, left: Words, within: Ranges, count: Callable[[BinCounts], None]) -> Ranges:
    """Return the lowest and the highest element that each of the ranges ``within`` holds: 16 bytes a competition.

    As :func:`summed_counts`, of competitions that have some left: one round.
    """

    def fill(ends: Words) -> None:
        own = BinCounts(num, left, within, 2, wanted="ends")
        count(own)
        ends[:] = own.bins.T

    return told_ranges(comm, len(left), fill)


def told_ranges(comm: Communicator, num: int, fill: Callable[[Words], object]) -> Ranges:
    """Return the least of the lowest and the greatest of the highest that ranks' ``fill`` writes, of ``num`` ranges.

    It writes, (2, num), less the lowest and the highest, where it knows of any; the high end of what no rank knows is
    ``NO_END``. One round of 16 bytes a range; every rank must call it.
    """
    less_lows, highs = max_together(comm, (2, num), lambda words: fill(words.fill_(NO_END).numpy())).numpy()
    return Ranges(-less_lows, highs)
