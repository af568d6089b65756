"""The k lowest of scores that no rank holds whole, exactly, by counting.

A radix select over (key, position), lexicographic, run for many competitions at once. Every round
counts owners' elements in equal bins of the range that is left, sums the counts over the ranks, and
keeps the bin in which the k-th falls: first over the keys, then, among the elements that tie with
the k-th key, over the positions. Two sampling rounds come first and name a bracket of keys, so that
one read of the scores decides nearly all of the mask and sets few survivors aside. If the k-th is
not in the bracket, the counts say on which side it is, and the rounds over the keys start again
there: the result is exact either way.

What travels does not grow with the number of elements: the size of a round depends on the number of
competitions alone, the number of rounds on the kind of the scores and on whether ties have to be broken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives import Communicator, together
from distprune.kernels import compiled
from distprune.selection.competition import Competition, Range, Undecided, Words
from distprune.selection.counts import Contribution, summed_counts
from distprune.selection.device_tally import DeviceTally
from distprune.selection.sampling import sample_brackets
from distprune.selection.scan import (
    NUM_BELOW,
    NUM_COUNTS,
    NUM_GONE,
    NUM_INSIDE,
    NUM_NANS,
    Entry,
    KeyBits,
    count_beyond,
)
from distprune.selection.tally import Keep, Tally
from distprune.shards import fetched, on_host

__all__ = ["PUT_NUMEL", "Chosen", "Counts", "Put", "Selection", "put_whole", "raise_nans", "select_lowest"]

Array = npt.NDArray[Any]

# int64 words of one competition's row in a message, of which a word says whether all went well: 16 KiB in every round
# when many are batched; when one is alone, 64 KiB a round over keys and 128 KiB a round over positions.
_NUM_WORDS_BATCHED = (1 << 11) - 1
_NUM_WORDS_ALONE_KEYS = (1 << 13) - 1
_NUM_WORDS_ALONE_POSITIONS = (1 << 14) - 1


PUT_NUMEL = 1 << 18  # elements that are decided at a time, and put: they stay in a core's cache until they are used


class Put(ABC):
    """Takes what was chosen from some weights on the host, one range of local offsets after the other.

    It is done with what it takes before the next comes.
    """

    @abstractmethod
    def stays(self, start: int, stays: npt.NDArray[np.bool_]) -> None:
        """Take which elements stay, from ``start`` on."""

    @abstractmethod
    def memory(self, num: int) -> npt.NDArray[np.signedinteger]:
        """Return memory for the bits of ``num`` weights, 1-D; the next call may return it again."""

    @abstractmethod
    def left(self, start: int, left: npt.NDArray[np.signedinteger]) -> None:
        """Take, in such memory, the bits of the weights from ``start`` on, 0 where they go."""


@dataclass(frozen=True)
class Counts:
    """Of local elements: ``num_pruned`` go; ``num_gone``, those of them that were pruned before."""

    num_gone: int
    num_pruned: int
    num_nans: int = 0


@dataclass(frozen=True)
class Chosen(Counts):
    """What was chosen from one shard: ``mask`` (bool, local shape, True = keep), and counts of what is False in it."""

    mask: torch.Tensor = field(kw_only=True)

    @staticmethod
    def all_of(masks: Sequence[torch.Tensor], counts: Sequence[torch.Tensor]) -> list[Chosen]:
        """Return what was chosen, given ``counts`` where they were counted, int64: gone, pruned and, if any, NaNs."""
        return [Chosen(*num.tolist(), mask=mask) for mask, num in zip(masks, fetched(counts), strict=True)]


def put_whole(chosen: Chosen, put: Put) -> Counts:
    """``put`` a whole mask, part by part, and return its counts."""
    flat = chosen.mask.view(-1).numpy()
    for start in range(0, len(flat), PUT_NUMEL):
        put.stays(start, flat[start : start + PUT_NUMEL])
    return chosen


def _decide(entry: Entry, first_position: int, state: Undecided, put: Put) -> Counts:
    """Choose from elements whose positions are side by side; ``state`` is settled: one key is left, and one position.

    All that tie with that key go up to that position, so that as a rule one comparison decides all of a chunk.
    """
    order, num_going = state.competition.order, state.positions.low + 1 - first_position  # of what ties
    size = min(PUT_NUMEL, entry.geometry.local_numel)
    bits_at, flags = KeyBits(entry.scores, order, size), np.empty(size, dtype=np.bool_)
    num_gone = num_pruned = num_nans = 0
    for start in range(0, entry.geometry.local_numel, PUT_NUMEL):
        at = slice(start, min(start + PUT_NUMEL, entry.geometry.local_numel))
        num = at.stop - start
        out: Array = put.memory(num) if bits_at.are_weights else flags[:num]
        edge = min(max(num_going - start, 0), num)
        all_bits, magnitude = bits_at(at)
        for part, key in ((slice(edge), state.keys.low), (slice(edge, None), state.keys.low - 1)):
            if len(bits := all_bits[part]):
                num_stay, lowest, highest = _keep_above(bits, magnitude, key, out[part])
                nans, gone = count_beyond(order, bits, magnitude, lowest, highest)
                num_pruned, num_nans, num_gone = num_pruned + len(bits) - num_stay, num_nans + nans, num_gone + gone
        (put.left if bits_at.are_weights else put.stays)(start, out)
    return Counts(num_gone, num_pruned, num_nans)


def _keep_above(bits: Array, magnitude: Any, key: int, out: Array) -> tuple[int, Any, Any]:
    """Write into ``out`` which keys are above ``key``, or, if it is not bool, the bits of those, and 0 for the others.

    Return how many are above, and the lowest and the highest of all.
    """
    above = bits.dtype.type(key)
    if (loops := compiled()) is not None:
        loop = loops.keep_above if out.dtype == np.bool_ else loops.leave_above
        found: tuple[int, Any, Any] = loop(bits, magnitude, above, out)
        return found
    np.greater(bits, above, out=out)  # they are keys
    return int(np.count_nonzero(out)), bits.min(), bits.max()


@dataclass(frozen=True)
class Selection:
    """``thresholds[c]`` is the score of the last element pruned in competition c, ``None`` where only those go that
    were gone before. ``settle`` writes the masks: local; the caller runs it within its own next round. ``decide``
    chooses from some elements of the host, part of an entry or not, and puts what stays of them: local, one read of
    their scores."""

    thresholds: list[float | int | None]
    settle: Callable[[], list[Chosen]]  # by entry
    decide: Callable[[Entry, Put], Counts]


def select_lowest(
    comm: Communicator,
    competitions: Sequence[Competition],
    make_entries: Callable[[], Sequence[Entry]],
    *,
    writes: bool = True,
) -> Selection:
    """Return the masks that prune, in every competition, exactly the ``num_lowest`` lowest elements.

    Elements are ordered by (score, position): of equal scores the lowest position is pruned first. All that is gone is
    pruned, even if that is more than ``num_lowest``. Every rank of ``comm`` must call it with the same
    ``competitions``. ``make_entries`` returns the rank's own entries, with replicas. Every element must be owned by
    exactly one rank. Without ``writes`` no masks are made, of entries on the host, and only ``decide`` has them.

    Communicates sums only. Rounds: 2 to sample; over keys 1 for 16-bit scores, 2 for 32-bit, 4 for
    64-bit (5 when batched), and more only for scores so spread out that a bracket spans many powers of
    two (at most 2, 3, and 5 or 6), or when a bracket missed; over positions none unless some of the
    elements that tie with a k-th go and others stay, then at most 3 (up to 8e9 positions). Bytes a
    round: 16 KiB for each of several competitions; alone, 64 KiB, over positions 128 KiB (at most 640 KiB
    in all for 32-bit scores).

    Local work on a CPU: one read of the scores, one write of the mask, a sample; on a device one read for each round
    over keys and positions, and one wait for the device a round. Temporaries stay under 64 MiB.

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
    states = [
        Undecided(c, Range(c.order.first, c.order.last), Range(0, max(c.num_positions - 1, 0))) for c in competitions
    ]
    own = _OwnPart(states, make_entries, writes)

    def decide(entry: Entry, put: Put) -> Counts:
        state = states[entry.competition].settled()
        if entry.geometry.flat_start is not None:
            return _decide(entry, entry.first_position + entry.geometry.flat_start, state, put)
        tally = Tally(entry, state, Keep())
        tally.settle_positions()
        num_nans, num_gone, num_pruned = tally.counts().tolist()
        return put_whole(Chosen(num_gone, num_pruned, num_nans, mask=tally.mask), put)

    if not competitions:
        return Selection([], own.settle, decide)
    batched = len(competitions) > 1
    num_key_words = _NUM_WORDS_BATCHED if batched else _NUM_WORDS_ALONE_KEYS
    num_position_words = _NUM_WORDS_BATCHED if batched else _NUM_WORDS_ALONE_POSITIONS
    sample_brackets(comm, states, lambda: own.entries, num_key_words)
    while not all(state.is_key_known or state.only_gone for state in states):
        counts = summed_counts(comm, len(states), num_key_words, own.counts)
        _check(comm, own, states, counts)
        for state, row in zip(states, counts, strict=True):
            _narrow_keys(state, row)
    for state in states:
        state.settle_ties()
    while any(state.positions.low < state.positions.high for state in states):
        counts = summed_counts(comm, len(states), num_position_words, lambda: own.counts(of_positions=True))
        for state, row in zip(states, counts, strict=True):
            state.positions = state.narrow(state.positions, row)
    thresholds = [None if s.only_gone else s.competition.order.value(s.keys.low) for s in states]
    return Selection(thresholds, own.settle, decide)


class _OwnPart:
    """What this rank counts. Its methods run within a round: what they raise is raised on all ranks."""

    def __init__(self, states: Sequence[Undecided], make_entries: Callable[[], Sequence[Entry]], writes: bool) -> None:
        self._states = states
        self._writes = writes
        self._make_entries = make_entries
        self._keep = Keep()

    @cached_property
    def entries(self) -> Sequence[Entry]:
        return self._make_entries()

    @cached_property
    def tallies(self) -> list[Tally | DeviceTally]:
        return [
            Tally(entry, self._states[entry.competition], self._keep, writes=self._writes)
            if on_host(entry.scores.device)
            else DeviceTally(entry, self._states[entry.competition])
            for entry in self.entries
        ]

    def counts(self, *, of_positions: bool = False) -> Iterator[Contribution]:
        """Yield what counts the tallies' keys, or their positions."""
        for tally in self.tallies:
            tally.settle_keys()
            count = tally.count_positions if of_positions else tally.count_keys
            yield tally.entry.competition, tally.entry.scores.device, count

    def num_nans(self) -> dict[str, int]:
        owned = [tally for tally in self.tallies if tally.entry.owned]
        found = fetched([tally.counts() for tally in owned])
        return {tally.entry.name: int(counts[0]) for tally, counts in zip(owned, found, strict=True)}

    def settle(self) -> list[Chosen]:
        for tally in self.tallies:
            tally.settle_keys()
            tally.settle_positions()
        return Chosen.all_of([tally.mask for tally in self.tallies], [tally.counts()[1:] for tally in self.tallies])


def _narrow_keys(state: Undecided, row: Words) -> None:
    """Take over one round of key counts; where the bracket missed, go on beside it."""
    k, order = state.competition.num_lowest, state.competition.order
    if state.only_gone:
        return
    if state.needs_scan:
        below, inside, gone = (int(row[i]) for i in (NUM_BELOW, NUM_INSIDE, NUM_GONE))
        if k <= below and state.keys.low > order.first:
            state.keys = Range(order.first, state.keys.low - 1)
            return
        if k <= gone:
            state.only_gone = True
            return
        if k > below + inside:
            state.keys = Range(state.keys.high + 1, order.last)
            return
        state.num_before, state.num_within, state.needs_scan = below, inside, False
    state.keys = state.narrow(state.keys, row[NUM_COUNTS:])


def _check(comm: Communicator, own: _OwnPart, states: Sequence[Undecided], counts: Words) -> None:
    """Raise, on every rank alike, if the scanned elements are not what the caller said."""
    if any(state.needs_scan and row[NUM_NANS] for state, row in zip(states, counts, strict=True)):
        with together(comm):
            num_nans = own.num_nans()
        raise_nans(comm, num_nans)
    for state, row in zip(states, counts, strict=True):
        competition, num_scanned = state.competition, sum(row[:NUM_NANS].tolist())
        if state.needs_scan and not state.only_gone and num_scanned != competition.num_positions:
            raise ValueError(
                f"{competition.name}: {num_scanned} elements compete, {competition.num_positions} were announced; "
                "every element must be owned by exactly one rank"
            )


def raise_nans(comm: Communicator, num_nans: Mapping[str, int]) -> NoReturn:
    """Raise, on every rank alike, a ``ValueError`` that says where scores are NaN. ``num_nans``: on this rank.

    Every rank must call it: two rounds.
    """
    found: dict[str, int] = {}
    for by_name in comm.gather({name: num for name, num in num_nans.items() if num}):
        for name, num in by_name.items():
            found[name] = found.get(name, 0) + num
    shown = ", ".join(f"{name!r} ({num})" for name, num in sorted(found.items()))
    raise ValueError(f"scores are NaN in {shown}; NaN has no place in the order, mend the values first")
