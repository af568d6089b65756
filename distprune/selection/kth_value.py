"""The k lowest of scores that no rank holds whole, exactly, by counting.

A radix select over (key, position), lexicographic, run for many competitions at once. Every round
counts owners' elements in equal bins of the range that is left, sums the counts over the ranks, and
keeps the bin in which the k-th falls: first over the keys, then, among the elements that tie with
the k-th key, over the positions. Where there are many elements, sampling rounds come first and name a
bracket of keys, so that one read of the scores decides nearly all of the mask and sets few survivors
aside; where there are many competitions, one round does (see ``quantiles``). If the k-th is not in the
bracket, the counts say on which side it is, and the rounds over the keys start again there: the result
is exact either way.

What travels does not grow with the number of elements: the number of competitions alone bounds the size
of a round; the number of rounds follows from the kind of the scores and from ties that have to be broken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

import numpy as np
import torch

from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.selection.competition import Competition, Flags, Ranges, Standings, Words
from distprune.selection.counts import BinCounts, summed_counts, summed_values, told_ends
from distprune.selection.decide import decide, stays_of
from distprune.selection.device_decide import Drafts
from distprune.selection.device_tally import DeviceTally
from distprune.selection.order import Order
from distprune.selection.quantiles import tell_quantiles
from distprune.selection.sampling import sample_brackets
from distprune.selection.scan import Entry, key_chunks
from distprune.selection.tally import Tally
from distprune.selection.told import can_tell, tell_keys
from distprune.shards.device import by_accelerator, count_true, fetched, on_host
from distprune.shards.geometry import Geometry


@dataclass(frozen=True)
class Selection:
    """``thresholds[c]`` is the score of the last element pruned in competition c, ``None`` where nothing new is.

    ``drafts``: of what was read on a device.
    """

    thresholds: list[float | int | None]
    standings: Standings
    drafts: Drafts

    def decide(self, entries: Sequence[Entry], outs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Write what stays of ``entries``, or of pieces of some: see :func:`distprune.selection.decide.decide`."""
        return decide(self.standings, entries, outs, self.drafts)

    def stays(self, keys: torch.Tensor, competition: int, geometry: Geometry, first_position: int) -> torch.Tensor:
        """Return which of some elements stay: see :func:`distprune.selection.decide.stays_of`."""
        return stays_of(self.standings, keys, competition, geometry, first_position)


def select_lowest(
    comm: Communicator,
    competitions: Sequence[Competition],
    make_entries: Callable[[], Sequence[Entry]],
    *,
    tells: bool = False,
) -> Selection:
    """Return what prunes, in every competition, exactly the ``num_lowest`` lowest elements.

    Elements are ordered by (score, position): of equal scores the lowest position is pruned first. All that is gone is
    pruned, even if that is more than ``num_lowest``. Every rank of ``comm`` must call it with the same
    ``competitions``. ``make_entries`` returns the rank's own entries, with replicas. Every element must be owned by
    exactly one rank.

    Communicates sums, and one maximum. Rounds of one competition: to sample, where there are more than 2**21 elements a
    rank, 2 as a rule (with 128 competitions or more, one of 16 bytes each in any case); over keys 2 or 3 for 16-bit and
    32-bit scores and up to 5 for 64-bit, and more when a bracket missed; one that tells the last element, where one is
    left; over positions none unless some of the elements that tie with a k-th go and others stay, then at most 3 (up to
    5e11 positions). All competitions share 64 KiB a round, or have 24 bytes each if that is more: with fewer bins,
    there are more rounds, of which some tell the lowest and the highest of what is left, 16 bytes each.

    ``tells``: where competitors are so few that their keys fit into a message of 128 KiB, they are told in one round.

    Local work: a sample, one read of the scores, and one more to decide; on a device one wait a round. Where more is
    left after the first read than is set aside, that is read again in each round. Temporaries stay under 64 MiB.

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
    standings = Standings(competitions)
    own = _OwnPart(standings, make_entries)
    if not competitions:
        return Selection([], standings, {})
    is_told = tells and can_tell(standings) and tell_keys(comm, standings, lambda: own.entries)
    if not is_told:
        _count(comm, standings, own)
    return Selection(_thresholds(standings), standings, {} if is_told else own.drafts())


def _thresholds(standings: Standings) -> list[float | int | None]:
    by_order: dict[Order, list[int]] = {}
    for place in np.flatnonzero(~standings.only_gone).tolist():
        by_order.setdefault(standings.competitions[place].order, []).append(place)
    thresholds: list[float | int | None] = [None] * len(standings.competitions)
    for order, places in by_order.items():
        for place, value in zip(places, order.values(standings.keys.low[places].tolist()), strict=True):
            thresholds[place] = value
    return thresholds


def _count(comm: Communicator, standings: Standings, own: _OwnPart) -> None:
    """Narrow down what is left of every competition, round by round. Every rank must call it."""
    num = len(standings.competitions)
    if not tell_quantiles(comm, standings, lambda: own.entries):
        sample_brackets(comm, standings, lambda: own.entries)
    while len(left := standings.without_key):
        within, needs_scan = standings.keys.at(left), standings.needs_scan[left]
        most, wanted = int(standings.num_within[left].max()), bool(needs_scan.any())
        counts = summed_counts(comm, num, left, within, most, own.count_keys, with_beyond=wanted)
        _check(comm, own, standings, left, counts, needs_scan)
        num_within = standings.num_within[left]
        standings.narrow_keys(left, counts.bins, counts.beyond[:, 0])
        stuck = standings.stuck(left, num_within, counts.bins.shape[1])
        if 2 * len(stuck) > len(standings.without_key):
            standings.keys.put(stuck, told_ends(comm, num, stuck, standings.keys.at(stuck), own.count_keys))
    if len(left := standings.with_one_element):
        keys = summed_values(comm, num, left, standings.keys.at(left), own.count_keys)
        standings.keys.put(left, Ranges(keys, keys))
    standings.skip_ties()
    while len(left := standings.with_ties):
        within, most = standings.positions.at(left), int(standings.num_within[left].max())
        counts = summed_counts(comm, num, left, within, most, own.count_positions)
        standings.narrow_positions(left, counts.bins)


class _OwnPart:
    """What this rank counts. Its methods run within a round: what they raise is raised on all ranks."""

    def __init__(self, standings: Standings, make_entries: Callable[[], Sequence[Entry]]) -> None:
        self._standings = standings
        self._make_entries = make_entries

    @cached_property
    def entries(self) -> list[Entry]:
        """What this rank counts: of replicas, those that it owns."""
        return [entry for entry in self._make_entries() if entry.owned and entry.geometry.local_numel]

    @cached_property
    def _tallies(self) -> list[Tally | DeviceTally]:
        here = [entry for entry in self.entries if on_host(entry.scores.device)]
        there = by_accelerator(entry.scores.device for entry in self.entries)
        own = ([self.entries[i] for i in which] for which in there.values())
        return [Tally(self._standings, here), *(DeviceTally(self._standings, entries) for entries in own)]

    def count_keys(self, counts: BinCounts) -> None:
        for tally in self._tallies:
            tally.count_keys(counts)

    def drafts(self) -> Drafts:
        """Return what was written, as devices were read, of what stays."""
        there = [tally.drafts for tally in self._tallies if isinstance(tally, DeviceTally)]
        return {key: draft for drafts in there for key, draft in drafts.items()}

    def count_positions(self, counts: BinCounts) -> None:
        for tally in self._tallies:
            tally.count_positions(counts)

    def num_nans(self) -> dict[str, int]:
        """Return how many scores are NaN, by name."""
        counts: dict[str, torch.Tensor] = {}
        for entry in self.entries:
            order = self._standings.competitions[entry.competition].order
            nans = (count_true(keys > order.last) for _, keys in key_chunks(entry, order))
            counts[entry.name] = sum(nans, torch.zeros((), dtype=torch.int64, device="cpu"))
        return dict(zip(counts, map(int, fetched([*counts.values()])), strict=True))


def _check(
    comm: Communicator, own: _OwnPart, standings: Standings, left: Words, counts: BinCounts, scanned: Flags
) -> None:
    """Raise, on every rank alike, if the elements of the competitions that were ``scanned`` are not as was said."""
    if counts.num_nans:
        with together(comm):
            num_nans = own.num_nans()
        raise_nans(comm, num_nans)
    num_scanned = counts.bins.sum(1) + counts.beyond.sum(1)
    wrong = np.flatnonzero(scanned & (num_scanned != standings.num_positions[left]))
    for row in wrong[:1]:
        competition = standings.competitions[left[row]]
        raise ValueError(
            f"{competition.name}: other elements compete than the {competition.num_positions} that were announced; "
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
