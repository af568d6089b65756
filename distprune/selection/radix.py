"""The k lowest of scores that no rank holds whole, exactly, by counting.

An element's place in the order is (key, position), one long number. Every round counts one digit of it, among the
elements whose higher digits are known, sums the counts over the ranks, and takes the digit in which the k-th falls.

What travels does not grow with the number of elements: the number of competitions bounds the size of a round, the kind
of the scores and ties that have to be broken the number of rounds.

Nouns: the *position* of an element counts all elements of its competition before it, parameter by parameter. A *prefix*
is the digits of a number that are known.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from distprune.collectives.agree import sum_together
from distprune.collectives.base import Communicator
from distprune.selection.host import Digit, IntArray, Pile, Prefixes, Source, keep_above, piles_of
from distprune.selection.order import Order
from distprune.shards.device import count_true, on_host

_NUM_WORDS = 1 << 17  # of 8 bytes that all competitions share in a round: 1 MiB
_MOST_BITS = 16  # of a digit


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
class Selection:
    """By competition, the last that is pruned, in the order (key, position), and whether some may be gone.

    ``thresholds``: its score, ``None`` where nothing new is pruned.
    """

    thresholds: list[float | int | None]
    orders: list[Order]
    keys: list[int]
    positions: list[int]
    have_gone: list[bool]

    def decide(self, source: Source, out: torch.Tensor) -> torch.Tensor:
        """Write what stays of ``source``, or of a piece of one, into ``out`` (bool, 1-D). Local: one read.

        Return how many are pruned, how many of these were gone before, and 0 NaNs, which were looked for: int64, on the
        device of the scores.
        """
        i = source.competition
        order, key = self.orders[i], self.keys[i]
        edge = source.geometry.num_before(self.positions[i] + 1 - source.first_position)  # ties before it are pruned
        is_here, start, num_gone = on_host(out.device), 0, 0
        flags: Any = out.numpy() if is_here else out
        for keys in source.keys(order):
            stop = start + len(keys)
            keep_above(keys, key, edge - start, flags[start:stop])
            if self.have_gone[i]:
                num_gone += (keys < order.first).sum()
            start = stop
        if is_here:
            return torch.tensor([start - np.count_nonzero(flags), num_gone, 0], dtype=torch.int64, device="cpu")
        counts = torch.zeros(3, dtype=torch.int64, device=out.device)
        counts[0], counts[1] = start - count_true(out), num_gone
        return counts


def select_lowest(
    comm: Communicator, competitions: Sequence[Competition], make_sources: Callable[[], Sequence[Source]]
) -> Selection:
    """Return what prunes, in every competition, exactly the ``num_lowest`` lowest elements.

    Elements are ordered by (score, position): of equal scores the lowest position is pruned first. All that is gone is
    pruned, even if that is more than ``num_lowest``. Every rank of ``comm`` must call it with the same
    ``competitions``. ``make_sources`` returns the rank's own sources, with replicas. Every element must be owned by
    exactly one rank.

    Communicates sums. Rounds of one competition: over keys 1 for 16-bit scores, 2 for 32-bit and 4 for 64-bit; over
    positions none unless some of the elements that tie with a k-th go and others stay, else at most 3 (up to 2.8e14
    positions). A round has 512 KiB, or, of several competitions, 1 MiB in all: with more of them digits are narrower,
    and rounds are more.

    Local work: a read of the scores in each round; few elements that are left are set aside, and read no more.
    Temporaries stay under 64 MiB. What lies on a device is copied to the host in chunks.

    Raises:
        ValueError: on every rank: a score is NaN, or a competition has fewer elements than are to be pruned or
            other than it was said to have.
        Exception: what raises on one rank is raised on all.
    """
    for competition in competitions:  # the same on every rank, so all of them raise
        if not 0 <= competition.num_lowest <= competition.num_positions:
            raise ValueError(
                f"{competition.name}: {competition.num_lowest} elements are to be pruned, "
                f"there are {competition.num_positions}"
            )
    if not competitions:
        return Selection([], [], [], [], [])
    elements = _LocalElements(competitions, make_sources)
    orders = [competition.order for competition in competitions]
    num_lowest = np.array([competition.num_lowest for competition in competitions], dtype=np.int64)
    num_positions = np.array([competition.num_positions for competition in competitions], dtype=np.int64)
    keys, left, num_ties = _narrowed(comm, elements, max(order.num_bits for order in orders), num_lowest)
    is_new = (num_lowest > 0) & (keys > 0)  # the least key is that of what is gone
    last = num_positions.copy()
    broken = is_new & (left < num_ties)  # some of the ties are pruned, and others stay
    if broken.any():
        elements.which = broken
        positions, _, _ = _narrowed(comm, elements, (int(num_positions.max()) - 1).bit_length(), left, keys)
        last[broken] = positions[broken]
    signed = [order.gone + (int(key) if new else 0) for order, key, new in zip(orders, keys, is_new, strict=True)]
    scores = last_scores(orders, signed, is_new)
    return Selection(scores, orders, signed, last.tolist(), elements.have_gone.tolist())


def _narrowed(
    comm: Communicator, elements: _LocalElements, num_bits: int, left: IntArray, keys: Prefixes | None = None
) -> tuple[Prefixes, IntArray, IntArray]:
    """Return of each competition the number of its ``left``-th element: its key, or its position among some ``keys``.

    Return also the how-manyth it is of the elements with this number, and how many these are. Every rank must call it.
    """
    num, known = len(left), None
    num_within = left
    for shift, width in _digits(num_bits, num):
        digit = Digit(shift, width, known, keys)
        bins = sum_together(comm, (num, 1 << width), partial(elements.count, digit)).numpy()
        if known is None and keys is None:
            _check(comm, elements, bins, shift)
            elements.have_gone = bins[:, 0] > 0
        passed = np.cumsum(bins, axis=1)
        place = np.minimum((passed < left[:, None]).sum(1), bins.shape[1] - 1)[:, None]
        num_within = np.take_along_axis(bins, place, 1)[:, 0]
        left = left - np.take_along_axis(passed, place, 1)[:, 0] + num_within
        prefix = np.zeros(num, np.uint64) if known is None else known << np.uint64(width)
        known = prefix | place[:, 0].astype(np.uint64)
    assert known is not None
    return known, left, num_within


def _digits(num_bits: int, num: int) -> Iterator[tuple[int, int]]:
    """Yield shift and width of the digits of numbers of ``num_bits``, the highest first, of ``num`` competitions."""
    width = min(_MOST_BITS, max(1, (_NUM_WORDS // num).bit_length() - 1))
    num_digits = -(-num_bits // width)
    for high, low in itertools.pairwise(-(-num_bits * i // num_digits) for i in range(num_digits, -1, -1)):
        yield low, high - low


def last_scores(orders: Sequence[Order], keys: Sequence[int], are_new: Iterable[Any]) -> list[float | int | None]:
    """Return the scores of the ``keys`` that are new, each of its order; ``None`` for the others. Local."""
    by_order: dict[Order, list[int]] = {}
    for place in itertools.compress(range(len(keys)), are_new):
        by_order.setdefault(orders[place], []).append(place)
    scores: list[float | int | None] = [None] * len(keys)
    for order, places in by_order.items():
        for place, score in zip(places, order.values([keys[i] for i in places]), strict=True):
            scores[place] = score
    return scores


class _LocalElements:
    """What this rank counts: of replicas, those that it owns. Its methods run within a round."""

    def __init__(self, competitions: Sequence[Competition], make_sources: Callable[[], Sequence[Source]]) -> None:
        self.competitions, self._make_sources = competitions, make_sources
        self._piles: list[Pile] | None = None
        self.which = np.array([True] * len(competitions))  # the competitions that are counted
        self.have_gone = self.which  # those in which some may be gone

    def count(self, digit: Digit, message: torch.Tensor) -> None:
        """Add the counts of ``digit`` to ``message`` (competitions, 2**width)."""
        if self._piles is None:
            owned = [source for source in self._make_sources() if source.owned and source.geometry.local_numel]
            self._piles = piles_of([competition.order for competition in self.competitions], owned)
        for pile in self._piles:
            if self.which[pile.competitions].any():
                pile.count(digit, message.numpy())

    def num_nans(self) -> dict[str, int]:
        """Return how many scores are NaN, by name."""
        return {name: num for pile in self._piles or () for name, num in pile.num_nans().items()}


def _check(comm: Communicator, elements: _LocalElements, bins: IntArray, shift: int) -> None:
    """Raise, on every rank alike, if the elements of the competitions are not as was said, given their first counts.

    Every rank must call it: one round if some may be NaN.
    """
    may_have_nans = False
    for competition, digits, num in zip(elements.competitions, bins, bins.sum(1).tolist(), strict=True):
        if num != competition.num_positions:
            raise ValueError(
                f"{competition.name}: other elements compete than the {competition.num_positions} that were announced; "
                "every element must be owned by exactly one rank"
            )
        order = competition.order
        may_have_nans |= order.has_nans and bool(digits[order.last - order.gone >> shift :].any())
    if may_have_nans:
        num_nans: dict[str, int] = {}

        def count(words: torch.Tensor) -> None:
            num_nans.update(elements.num_nans())
            words[0] = sum(num_nans.values())

        if sum_together(comm, (1,), count)[0]:
            raise_nans(comm, num_nans)


def raise_nans(comm: Communicator, num_nans: Mapping[str, int]) -> NoReturn:
    """Raise, on every rank alike, a ``ValueError`` that says where scores are NaN. ``num_nans``: on this rank.

    Every rank must call it: two rounds.
    """
    total = Counter[str]()
    for local in comm.gather(+Counter(num_nans)):
        total.update(local)
    shown = ", ".join(f"{name!r} ({num})" for name, num in sorted(total.items()))
    raise ValueError(f"scores are NaN in {shown}; NaN has no place in the order, mend the values first")
