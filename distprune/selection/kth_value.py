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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import torch

from distprune.collectives import Communicator, together
from distprune.host_loops import load
from distprune.selection.competition import Competition, Range, Undecided, Words
from distprune.selection.counts import summed_counts
from distprune.selection.decide import decide
from distprune.selection.device_tally import count_keys_on_device, count_positions_on_device
from distprune.selection.put import Put
from distprune.selection.sampling import sample_brackets
from distprune.selection.scan import NUM_BELOW, NUM_COUNTS, NUM_GONE, NUM_INSIDE, NUM_NANS, Entry, key_chunks
from distprune.selection.tally import SurvivorMemory, Tally
from distprune.shards import count_true, fetched, on_host

# int64 words of one competition's row in a message, of which a word says whether all went well: 16 KiB in every round
# when many are batched; when one is alone, 64 KiB a round over keys and 128 KiB a round over positions.
_NUM_WORDS_BATCHED = (1 << 11) - 1
_NUM_WORDS_ALONE_KEYS = (1 << 13) - 1
_NUM_WORDS_ALONE_POSITIONS = (1 << 14) - 1

# Elements on the host: loading the compiled loops takes 0.9 s, of which each gets back about a nanosecond. For fewer
# they are used only if they are loaded already.
_WORTH_LOADING = 1 << 30


@dataclass(frozen=True)
class Selection:
    """``thresholds[c]`` is the score of the last element pruned in competition c, ``None`` where nothing new is."""

    thresholds: list[float | int | None]
    states: Sequence[Undecided]

    def decide(self, entry: Entry, put: Put) -> torch.Tensor:
        """Put what stays of ``entry``, or of a piece of one: see :func:`distprune.selection.decide.decide`."""
        return decide(entry, self.states[entry.competition], put)


def select_lowest(
    comm: Communicator,
    competitions: Sequence[Competition],
    make_entries: Callable[[], Sequence[Entry]],
) -> Selection:
    """Return what prunes, in every competition, exactly the ``num_lowest`` lowest elements.

    Elements are ordered by (score, position): of equal scores the lowest position is pruned first. All that is gone is
    pruned, even if that is more than ``num_lowest``. Every rank of ``comm`` must call it with the same
    ``competitions``. ``make_entries`` returns the rank's own entries, with replicas. Every element must be owned by
    exactly one rank.

    Communicates sums only. Rounds: 2 to sample; over keys 1 for 16-bit scores, 2 for 32-bit, 4 for
    64-bit (5 when batched), and more only for scores so spread out that a bracket spans many powers of
    two (at most 2, 3, and 5 or 6), or when a bracket missed; over positions none unless some of the
    elements that tie with a k-th go and others stay, then at most 3 (up to 8e9 positions). Bytes a
    round: 16 KiB for each of several competitions; alone, 64 KiB, over positions 128 KiB (at most 640 KiB
    in all for 32-bit scores).

    Local work on a CPU: a sample, one read of the scores, and one more to decide; on a device one read for each round
    over keys and positions, one wait for the device a round, and one read to decide. Temporaries stay under 64 MiB.

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
    own = _OwnPart(states, make_entries)
    if not competitions:
        return Selection([], states)
    batched = len(competitions) > 1
    num_key_words = _NUM_WORDS_BATCHED if batched else _NUM_WORDS_ALONE_KEYS
    num_position_words = _NUM_WORDS_BATCHED if batched else _NUM_WORDS_ALONE_POSITIONS
    sample_brackets(comm, states, lambda: own.entries, num_key_words)
    while not all(state.is_key_known or state.only_gone for state in states):
        counts = summed_counts(comm, states, num_key_words, lambda: own.entries, own.count_keys)
        _check(comm, own, states, counts)
        for state, row in zip(states, counts, strict=True):
            _narrow_keys(state, row)
    for state in states:
        state.skip_ties()
    while any(state.positions.low < state.positions.high for state in states):
        counts = summed_counts(comm, states, num_position_words, lambda: own.entries, own.count_positions)
        for state, row in zip(states, counts, strict=True):
            state.positions = state.narrow(state.positions, row)
    thresholds = [None if s.only_gone else s.competition.order.value(s.keys.low) for s in states]
    return Selection(thresholds, states)


class _OwnPart:
    """What this rank counts. Its methods run within a round: what they raise is raised on all ranks."""

    def __init__(self, states: Sequence[Undecided], make_entries: Callable[[], Sequence[Entry]]) -> None:
        self._states = states
        self._make_entries = make_entries
        self._memory = SurvivorMemory()
        self._tallies: dict[int, Tally] = {}  # by the id of the entry

    @cached_property
    def entries(self) -> list[Entry]:
        """What this rank counts: of replicas, those that it owns."""
        entries = self._make_entries()
        if sum(entry.geometry.local_numel for entry in entries if on_host(entry.scores.device)) >= _WORTH_LOADING:
            load()
        return [entry for entry in entries if entry.owned and entry.geometry.local_numel]

    def count_keys(self, row: torch.Tensor, entry: Entry, state: Undecided) -> None:
        if on_host(entry.scores.device):
            self._tally(entry, state).count_keys(row)
        else:
            count_keys_on_device(row, entry, state)

    def count_positions(self, row: torch.Tensor, entry: Entry, state: Undecided) -> None:
        if on_host(entry.scores.device):
            self._tally(entry, state).count_positions(row)
        else:
            count_positions_on_device(row, entry, state)

    def _tally(self, entry: Entry, state: Undecided) -> Tally:
        if id(entry) not in self._tallies:
            self._tallies[id(entry)] = Tally(entry, state, self._memory)
        return self._tallies[id(entry)]

    def num_nans(self) -> dict[str, int]:
        """Return how many scores are NaN, by name."""
        counts: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            order = self._states[entry.competition].competition.order
            nans = (count_true(keys > order.last) for _, keys in key_chunks(entry, order))
            counts[entry.name] = sum(nans, torch.zeros((), dtype=torch.int64, device="cpu"))
        return dict(zip(counts, map(int, fetched([*counts.values()])), strict=True))


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
