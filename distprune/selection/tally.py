"""What a rank's elements on the host add to the counts. Survivors are set aside, all together, where they are few.

Where several competitions have small entries, all of these are read together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from distprune.selection.competition import Flags, Keys, Standings, Words
from distprune.selection.counts import BinCounts
from distprune.selection.order import Order
from distprune.selection.scan import Array, Entry, KeyBits, Scan, Scanned, Stretch, in_threads, stretch_size, stretches
from distprune.shards.device import SMALL, batches

_KEPT_BYTES = 24 << 20  # survivors set aside on one rank; beyond that they are found again when needed
_SMALL_BYTES = 20 << 20  # of these at most, those of small entries that are read together


class Tally:
    """Counts of entries on the host. A stretch whose survivors are not set aside is *unread*: each round scans it."""

    def __init__(self, standings: Standings, entries: Sequence[Entry]) -> None:
        self._standings = standings
        large, self._small = _small_entries(standings, entries)
        self._entries = [*large, *self._small]
        self._starts = np.cumsum([0, *(entry.geometry.local_numel for entry in self._entries)])
        self._small_of = np.array([entry.competition for entry in self._small], dtype=np.int64)
        self._small_unread = np.ones(len(self._small), dtype=np.bool_)
        self._unread = [*stretches(large, stretch_size(torch.device("cpu")))]
        self._read: list[Stretch] = []
        self._scan = cache(Scan)  # by order
        # Of the survivors set aside: their places, or later their positions; keys; competitions, if there are several.
        self._place_dtype = np.dtype(np.uint32 if self._starts[-1] < 1 << 32 else np.int64)
        self._where: Array = np.empty(0, dtype=np.uint32)
        self._keys: Keys = np.empty(0, dtype=standings.key_dtype)
        self._of: Keys | None = None if len(standings.competitions) == 1 else np.empty(0, dtype=np.int32)
        self._are_positions = False

    def count_keys(self, counts: BinCounts) -> None:
        """Add the keys inside the ranges, and, on the first look, what is outside."""
        standings = self._standings
        self._read_again(standings.needs_scan & ~standings.only_gone)
        self._keep(standings.keys.hold(self._keys, self._of))
        self._read_small(counts)
        kept, num_bytes = [], self._where.nbytes + self._keys.nbytes
        for stretch, found in self._scanned(counts):
            if standings.needs_scan[of := stretch.competition]:
                counts.beyond[counts.rows[of]] += found.num_below, found.num_above
                counts.num_nans += found.num_nans
            num_bytes += found.num_bytes
            if num_bytes <= _KEPT_BYTES:
                kept.append((stretch, found))
            else:
                num_bytes -= found.num_bytes
                self._unread.append(stretch)
                counts.add(found.keys, of)
        self._set_aside(kept)
        counts.add(self._keys, self._of)

    def count_positions(self, counts: BinCounts) -> None:
        """Add the positions inside the ranges, of elements that tie with the k-th key."""
        keys, positions = self._standings.keys, self._standings.positions
        if not self._are_positions:
            self._keep(keys.hold(self._keys, self._of))
            self._keep(np.argsort(self._where))
            self._where, self._are_positions = self._positions(self._where), True
        self._keep(positions.hold(self._where, self._of))
        counts.add(self._where, self._of)
        unread = self._unread
        self._unread = [part for stretch in unread if counts.has(stretch.competition) for part in self._near(stretch)]
        for stretch, found in self._scanned(counts):
            ties, within = self._positions(found.places), counts.of(stretch.competition)
            counts.add(ties[within.hold(ties, None)], stretch.competition)
        self._unread = unread

    def _scanned(self, counts: BinCounts) -> Iterator[tuple[Stretch, Scanned]]:
        """Scan what is unread of the competitions that are counted, which is then unread no more."""
        wanted = [stretch for stretch in self._unread if counts.has(stretch.competition)]
        self._unread = [stretch for stretch in self._unread if not counts.has(stretch.competition)]

        def scanned(stretch: Stretch) -> Scanned:
            of, keys = stretch.competition, self._standings.keys
            scan = self._scan(self._standings.competitions[of].order)
            return scan(stretch, int(keys.low[of]), int(keys.high[of]))

        yield from zip(wanted, in_threads(scanned, wanted), strict=True)

    def _near(self, stretch: Stretch) -> Iterator[Stretch]:
        """Yield, piece by piece, what of ``stretch`` may be among the positions of its competition."""
        of, positions = stretch.competition, self._standings.positions
        place = stretch.place
        for entry, at in stretch.pieces:
            start, stop, first = at.start, at.stop, entry.geometry.flat_start
            if first is not None:
                begin = entry.first_position + first
                start = max(start, int(positions.low[of]) - begin)
                stop = min(stop, int(positions.high[of]) + 1 - begin)
            if start < stop:
                yield Stretch(of, [(entry, slice(start, stop))], place + start - at.start, stop - start)
            place += at.stop - at.start

    def _positions(self, places: Array) -> Words:
        """Return the positions of the elements at ``places``, which ascend."""
        bounds = np.searchsorted(places, self._starts)
        positions = np.empty(len(places), dtype=np.int64)
        for i in np.flatnonzero(np.diff(bounds)).tolist():
            entry, at = self._entries[i], slice(bounds[i], bounds[i + 1])
            offsets = torch.from_numpy(places[at].astype(np.int64) - self._starts[i])
            positions[at] = entry.geometry.flat_indices_at(offsets).numpy() + entry.first_position
        return positions

    def _keep(self, which: Flags | Words) -> None:
        """Let go of the other survivors; put them into that order."""
        self._where, self._keys = self._where[which], self._keys[which]
        self._of = None if self._of is None else self._of[which]

    def _read_again(self, missed: Flags) -> None:
        """Forget what was read of competitions whose bracket ``missed``."""
        if missed.any():
            self._small_unread |= missed[self._small_of]
            self._unread += [stretch for stretch in self._read if missed[stretch.competition]]
            self._read = [stretch for stretch in self._read if not missed[stretch.competition]]
            self._keep(np.zeros(len(self._keys), dtype=np.bool_) if self._of is None else ~missed[self._of])

    def _read_small(self, counts: BinCounts) -> None:
        """Read the small entries that are unread, all of which need a scan; set their survivors aside."""
        competitions, keys_of_all, found = self._standings.competitions, self._standings.keys, []
        by_order: dict[Order, list[int]] = {}
        for i in np.flatnonzero(self._small_unread).tolist():
            by_order.setdefault(competitions[self._small[i].competition].order, []).append(i)
        self._small_unread[:] = False
        for order, of_order in by_order.items():
            bits = KeyBits(order)
            for which in batches(of_order, [self._small[i].geometry.local_numel for i in of_order]):
                numels = np.array([self._small[i].geometry.local_numel for i in which])
                keys = bits([self._small[i].whole for i in which])
                of = np.repeat(self._small_of[which], numels)
                starts = self._starts[len(self._entries) - len(self._small) :][which]
                is_below, is_above = keys < keys_of_all.low[of], keys > keys_of_all.high[of]
                for column, are_beyond in enumerate((is_below, is_above)):
                    counts.beyond[:, column] += np.bincount(counts.rows[of[are_beyond]], minlength=len(counts.beyond))
                counts.num_nans += int(np.count_nonzero(keys > order.last))
                inside = ~(is_below | is_above)
                places = np.repeat(starts - (np.cumsum(numels) - numels), numels) + np.arange(len(keys))
                found.append((places[inside].astype(self._place_dtype), keys[inside], of[inside].astype(np.int32)))
        if found:
            self._where, self._keys, self._of = (
                np.concatenate(parts) for parts in zip((self._where, self._keys, self._of), *found, strict=True)
            )

    def _set_aside(self, kept: Sequence[tuple[Stretch, Scanned]]) -> None:
        self._read += [stretch for stretch, _ in kept]
        self._where = np.concatenate([self._where, *(found.places for _, found in kept)])
        self._keys = np.concatenate([self._keys, *(found.keys for _, found in kept)])
        if self._of is not None:
            competitions = np.array([stretch.competition for stretch, _ in kept], dtype=np.int32)
            self._of = np.concatenate([self._of, np.repeat(competitions, [len(found.keys) for _, found in kept])])


def _small_entries(standings: Standings, entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Return ``entries`` that are scanned one by one, and small ones of several competitions, to be read together."""
    large: list[Entry] = []
    small: list[Entry] = []
    left = _SMALL_BYTES // (8 + standings.key_dtype.itemsize) if len(standings.competitions) > 1 else 0
    for entry in entries:
        numel = entry.geometry.local_numel
        is_read_together = numel <= min(left, SMALL)
        (small if is_read_together else large).append(entry)
        left -= numel if is_read_together else 0
    return large, small
