"""One parameter's part in a competition on this rank: what it adds to the counts, and its mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from distprune.selection.competition import Range, Undecided, Words, histogram
from distprune.selection.scan import Counts, Entry, Survivors, scan

__all__ = ["NUM_HEADER_WORDS", "Keep", "Tally"]

NUM_HEADER_WORDS = 4  # a row of key counts begins: below the bracket, inside, above, NaNs

_KEPT_BYTES = 24 << 20  # survivors set aside on one rank; beyond that they are found again when needed


@dataclass
class Keep:
    """What is left of the memory for survivors, shared by a rank's tallies."""

    num_bytes: int = _KEPT_BYTES

    def take(self, num_bytes: int) -> bool:
        if num_bytes > self.num_bytes:
            return False
        self.num_bytes -= num_bytes
        return True


class Tally:
    """Counts of one entry. Survivors are set aside where they are few, and found anew where they are many."""

    def __init__(self, entry: Entry, state: Undecided, keep: Keep) -> None:
        self.entry = entry
        self.num_nans = 0
        self.mask = torch.empty(entry.geometry.local_shape, dtype=torch.bool, device=entry.scores.device)
        self._state = state
        self._keep = keep
        self._survivors: Survivors | None = None
        self._positions: Words | None = None

    @property
    def _bracket(self) -> tuple[int, int]:
        return self._state.keys.low, self._state.keys.high

    def count_keys(self, row: Words) -> None:
        """Add the owned keys inside the state's range to ``row``; on the first look, what lies outside too."""
        if self._survivors is None:
            if self._state.is_key_known:
                return  # many ties with the k-th key, and nothing left to learn about it
            counts = self._scan_keys(row)
            self.num_nans = counts.num_nans
            if self._state.needs_scan and self.entry.owned:
                row[:NUM_HEADER_WORDS] += (counts.num_below, counts.num_inside, counts.num_above, counts.num_nans)
        else:
            self._add_keys(row, self._survivors)

    def _scan_keys(self, row: Words) -> Counts:
        total = Counts()
        kept: list[Survivors] | None = []
        for counts, found in scan(self.entry, self._state.competition.order, self._bracket, self.mask):
            total.add(counts)
            if kept is not None and self._keep.take(_num_bytes(found)):
                kept.append(found)
                continue
            for survivors in kept or ():  # too many to keep: count them as they come
                self._keep.num_bytes += _num_bytes(survivors)
                self._add_keys(row, survivors)
            kept = None
            self._add_keys(row, found)
        if kept is not None:
            self._survivors = _joined(kept)
            self._add_keys(row, self._survivors)
        return total

    def _add_keys(self, row: Words, found: Survivors) -> None:
        if self.entry.owned and len(found.keys):
            bins = row[NUM_HEADER_WORDS:]
            bins += histogram(found.keys, self._state.keys, len(bins))

    def settle_keys(self) -> None:
        """Write what the last round over the keys decided, and set aside only what it did not."""
        if self._survivors is None:
            return
        if self._state.needs_scan:  # the bracket missed: the next scan writes the whole mask again
            self._keep.num_bytes += _num_bytes(self._survivors)
            self._survivors = None
            return
        low, high = self._bracket
        keys, offsets = self._survivors.keys, self._survivors.offsets
        self._prune(offsets[keys < low])
        left = (keys >= low) & (keys <= high)
        before = _num_bytes(self._survivors)
        self._survivors = Survivors(offsets[left], keys[left])
        self._keep.num_bytes += before - _num_bytes(self._survivors)

    def count_positions(self, row: Words) -> None:
        """Add the owned positions inside the state's range, of elements that tie with the k-th key."""
        if not self.entry.owned or self._state.competition.num_lowest == 0:
            return
        within = self._state.positions
        for positions in self._positions_of_ties(within):
            inside = positions[(positions >= within.low) & (positions <= within.high)]
            if len(inside):
                row += histogram(inside, within, len(row))

    def settle_positions(self) -> None:
        """Write the rest of the mask: ties are pruned up to the position that was found."""
        if self._state.competition.num_lowest == 0:
            return
        order = self._state.competition.order
        if self._survivors is None:
            parts = (found for _, found in scan(self.entry, order, self._bracket, self.mask))
        else:
            parts = (found for found in (self._survivors,))
        for offsets in (found.offsets for found in parts):
            self._prune(offsets[self._positions_of(offsets) <= self._state.positions.low])

    def _positions_of_ties(self, within: Range) -> Iterator[Words]:
        """Yield the positions of elements whose key is the k-th, all those ``within`` among them."""
        if self._survivors is not None:
            if self._positions is None:
                self._positions = self._positions_of(self._survivors.offsets)
            yield self._positions
            return
        offsets: tuple[int, int] | None = None
        if self.entry.geometry.flat_start is not None:
            first, numel = self.entry.first_position + self.entry.geometry.flat_start, self.entry.geometry.local_numel
            offsets = min(max(within.low - first, 0), numel), min(max(within.high + 1 - first, 0), numel)
        for _, found in scan(self.entry, self._state.competition.order, self._bracket, offsets=offsets):
            yield self._positions_of(found.offsets)

    def _positions_of(self, offsets: Words) -> Words:
        return self.entry.first_position + self.entry.geometry.flat_indices_at(offsets.astype(np.int64, copy=False))

    def _prune(self, offsets: Words) -> None:
        flat = self.mask.view(-1)
        if flat.device.type == "cpu":
            flat.numpy()[offsets] = False  # a third of the time that torch's indexing takes
        else:
            flat[torch.from_numpy(offsets.astype(np.int64, copy=False)).to(flat.device)] = False


def _num_bytes(survivors: Survivors) -> int:
    return int(survivors.offsets.nbytes + survivors.keys.nbytes)


def _joined(kept: list[Survivors]) -> Survivors:
    if not kept:
        return Survivors(np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
    return Survivors(np.concatenate([s.offsets for s in kept]), np.concatenate([s.keys for s in kept]))
