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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune.collectives import Communicator
from distprune.selection.competition import Competition, Range, Undecided, Words
from distprune.selection.sampling import sample_brackets
from distprune.selection.scan import Entry
from distprune.selection.tally import NUM_HEADER_WORDS, Keep, Tally

__all__ = ["Selection", "select_lowest"]

# int64 words of one competition's row in a message: 16 KiB in every round when many are batched; when
# one is alone, 64 KiB a round over keys and 128 KiB a round over positions.
_NUM_WORDS_BATCHED = 1 << 11
_NUM_WORDS_ALONE_KEYS = 1 << 13
_NUM_WORDS_ALONE_POSITIONS = 1 << 14


@dataclass(frozen=True)
class Selection:
    """``masks[i]`` belongs to entry i (bool, local shape, True = keep); ``thresholds[c]`` is the score of
    the last element pruned in competition c, ``None`` where none was."""

    masks: list[torch.Tensor]
    thresholds: list[float | int | None]


def select_lowest(comm: Communicator, competitions: Sequence[Competition], entries: Sequence[Entry]) -> Selection:
    """Return the masks that prune, in every competition, exactly the ``num_lowest`` lowest elements.

    Elements are ordered by (score, position): equal scores go from the lowest position up. Every rank
    of ``comm`` must call it with the same ``competitions``; ``entries`` are the rank's own, replicas
    included, and every eligible element must be owned exactly once.

    Communicates sums only. Rounds: 2 to sample; over keys 1 for 16-bit scores, 2 for 32-bit, 4 for
    64-bit (5 when batched), and more only for scores so spread out that a bracket spans many powers of
    two (at most 2, 3, and 5 or 6), or when a bracket missed; over positions none unless some of the
    elements that tie with a k-th go and others stay, then at most 3 (up to 8e9 positions). Bytes a
    round: 16 KiB for each of several competitions; alone, 64 KiB, over positions 128 KiB (at most 640 KiB
    in all for 32-bit scores).

    Local work: one read of the scores, one write of the mask, a sample; temporaries stay under 64 MiB.

    Raises:
        ValueError: on every rank: a score is NaN, or a competition has fewer eligible elements than
            are to be pruned or other than it was said to have.
    """
    if not competitions:
        return Selection([], [])
    for competition in competitions:  # the same on every rank, so all of them raise
        if not 0 <= competition.num_lowest <= competition.num_eligible:
            raise ValueError(
                f"{competition.name}: {competition.num_lowest} elements are to be pruned, "
                f"{competition.num_eligible} are left"
            )
    batched = len(competitions) > 1
    num_key_words = _NUM_WORDS_BATCHED if batched else _NUM_WORDS_ALONE_KEYS
    num_position_words = _NUM_WORDS_BATCHED if batched else _NUM_WORDS_ALONE_POSITIONS
    states = [
        Undecided(c, Range(c.order.first, c.order.last), Range(0, max(c.num_positions - 1, 0))) for c in competitions
    ]
    keep = Keep()
    tallies = [Tally(entry, states[entry.competition], keep) for entry in entries]

    sample_brackets(comm, states, entries, num_key_words)
    span = max(c.order.last - c.order.first + 1 for c in competitions)
    num_key_rounds = _num_rounds(span, num_key_words - NUM_HEADER_WORDS)
    num_left = num_key_rounds
    while num_left and not all(state.is_key_known for state in states):
        num_left -= 1
        counts = _reduce(comm, tallies, len(states), num_key_words, lambda tally, row: tally.count_keys(row))
        _check(comm, tallies, states, counts)
        if _narrow_keys(states, counts):
            num_left = num_key_rounds
        for tally in tallies:
            tally.settle_keys()

    for state in states:
        state.settle_ties()
    while any(state.positions.low < state.positions.high for state in states):
        counts = _reduce(comm, tallies, len(states), num_position_words, lambda tally, row: tally.count_positions(row))
        for state, row in zip(states, counts, strict=True):
            state.positions = state.narrow(state.positions, row)
    for tally in tallies:
        tally.settle_positions()
    return Selection([tally.mask for tally in tallies], [_threshold(state) for state in states])


def _threshold(state: Undecided) -> float | int | None:
    return state.competition.order.value(state.keys.low) if state.competition.num_lowest else None


def _num_rounds(span: int, num_bins: int) -> int:
    num_rounds, covered = 1, num_bins
    while covered < span:
        num_rounds, covered = num_rounds + 1, covered * num_bins
    return num_rounds


def _reduce(
    comm: Communicator,
    tallies: Iterable[Tally],
    num_rows: int,
    num_words: int,
    count: Callable[[Tally, Words], None],
) -> Words:
    rows = np.zeros((num_rows, num_words), dtype=np.int64)
    for tally in tallies:
        count(tally, rows[tally.entry.competition])
    reduced: Words = comm.sum(torch.from_numpy(rows)).numpy()
    return reduced


def _narrow_keys(states: Sequence[Undecided], counts: Words) -> bool:
    """Take over one round of key counts; return whether a bracket missed."""
    missed = False
    for state, row in zip(states, counts, strict=True):
        below, inside, bins = int(row[0]), int(row[1]), row[NUM_HEADER_WORDS:]
        k, order = state.competition.num_lowest, state.competition.order
        if state.needs_scan and 0 < k <= below:
            state.keys, missed = Range(order.first, state.keys.low - 1), True
        elif state.needs_scan and k > below + inside:
            state.keys, missed = Range(state.keys.high + 1, order.last), True
        else:
            if state.needs_scan:
                state.num_before, state.num_within, state.needs_scan = below, inside, False
            state.keys = state.narrow(state.keys, bins)
    return missed


def _check(comm: Communicator, tallies: Sequence[Tally], states: Sequence[Undecided], counts: Words) -> None:
    """Raise, on every rank alike, if the scanned elements are not what the caller said."""
    if any(state.needs_scan and row[3] for state, row in zip(states, counts, strict=True)):
        own = {tally.entry.name: tally.num_nans for tally in tallies if tally.entry.owned and tally.num_nans}
        found: dict[str, int] = {}
        for by_name in comm.gather(own):
            for name, num_nans in by_name.items():
                found[name] = found.get(name, 0) + num_nans
        shown = ", ".join(f"{name!r} ({num_nans})" for name, num_nans in sorted(found.items()))
        raise ValueError(f"scores are NaN in {shown}; NaN has no place in the order, mend the values first")
    for state, row in zip(states, counts, strict=True):
        competition, num_eligible = state.competition, int(row[:3].sum())
        if state.needs_scan and num_eligible != competition.num_eligible:
            raise ValueError(
                f"{competition.name}: {num_eligible} elements compete, {competition.num_eligible} were announced; "
                "every element must be owned by exactly one rank"
            )
