"""One parameter's part in a competition on this rank: what it adds to the counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from distprune.selection.competition import Range, Undecided, Words, add_histogram
from distprune.selection.scan import NUM_COUNTS, NUM_NANS, Entry, Survivors, scan

__all__ = ["SurvivorMemory", "Tally"]

_KEPT_BYTES = 24 << 20  # survivors set aside on one rank; beyond that they are found again when needed


@dataclass
class SurvivorMemory:
    """What is left of the memory for survivors, shared by a rank's tallies."""

    num_bytes: int = _KEPT_BYTES

    def take(self, num_bytes: int) -> bool:
        if num_bytes > self.num_bytes:
            return False
        self.num_bytes -= num_bytes
        return True


class Tally:
    """Counts of one entry on the CPU. Survivors are set aside where they are few, else found anew when needed."""

    def __init__(self, entry: Entry, state: Undecided, memory: SurvivorMemory) -> None:
        self.entry = entry
        self._num_nans = 0
        self._state = state
        self._memory = memory
        self._survivors: Survivors | None = None
        self._positions: torch.Tensor | None = None

    def num_nans(self) -> torch.Tensor:
        """Return how many local scores are NaN, int64."""
        return torch.tensor(self._num_nans)

    def count_keys(self, row: torch.Tensor) -> None:
        """Add the owned keys inside the state's range to ``row``; on the first look, what lies outside too."""
        if self._survivors is None:
            if self._state.is_key_known or self._state.only_gone:
                return  # many ties with the k-th key, and nothing left to learn about it
            counts = self._scan_keys(row)
            self._num_nans = int(counts[NUM_NANS])
            if self._state.needs_scan and self.entry.owned:
                row[:NUM_COUNTS] += torch.from_numpy(counts)
        else:
            self._add_keys(row, self._survivors)

    def _scan_keys(self, row: torch.Tensor) -> Words:
        total = np.zeros(NUM_COUNTS, dtype=np.int64)
        kept: list[Survivors] | None = []
        for counts, found in scan(self.entry, self._state.competition.order, self._state.keys):
            total += counts
            if kept is not None and self._memory.take(_num_bytes(found)):
                kept.append(found)
                continue
            for survivors in kept or ():  # too many to keep: count them as they come
                self._memory.num_bytes += _num_bytes(survivors)
                self._add_keys(row, survivors)
            kept = None
            self._add_keys(row, found)
        if kept is not None:
            self._survivors = _joined(kept)
            self._add_keys(row, self._survivors)
        return total

    def _add_keys(self, row: torch.Tensor, found: Survivors) -> None:
        if self.entry.owned and len(found.keys):
            add_histogram(row[NUM_COUNTS:], torch.from_numpy(found.keys), self._state.keys)

    def narrow(self) -> None:
        """Set aside only the survivors that the last round over the keys did not decide."""
        if self._survivors is None:
            return
        before = _num_bytes(self._survivors)
        if self._state.needs_scan:  # the bracket missed
            self._memory.num_bytes += before
            self._survivors = None
            return
        low, high = self._state.keys.low, self._state.keys.high
        keys, offsets = self._survivors.keys, self._survivors.offsets
        left = (keys >= low) & (keys <= high)
        self._survivors = Survivors(offsets[left], keys[left])
        self._memory.num_bytes += before - _num_bytes(self._survivors)

    def count_positions(self, row: torch.Tensor) -> None:
        """Add the owned positions inside the state's range, of elements that tie with the k-th key."""
        if not self.entry.owned or self._state.only_gone:
            return
        within = self._state.positions
        for positions in self._positions_of_ties(within):
            inside = positions[(positions >= within.low) & (positions <= within.high)]
            if len(inside):
                add_histogram(row, inside, within)

    def _positions_of_ties(self, within: Range) -> Iterator[torch.Tensor]:
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
        for _, found in scan(self.entry, self._state.competition.order, self._state.keys, offsets=offsets):
            yield self._positions_of(found.offsets)

    def _positions_of(self, offsets: Words) -> torch.Tensor:
        flat = self.entry.geometry.flat_indices_at(torch.from_numpy(offsets.astype(np.int64, copy=False)))
        return flat + self.entry.first_position


def _num_bytes(survivors: Survivors) -> int:
    return int(survivors.offsets.nbytes + survivors.keys.nbytes)


def _joined(kept: list[Survivors]) -> Survivors:
    if not kept:
        return Survivors(np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
    return Survivors(np.concatenate([s.offsets for s in kept]), np.concatenate([s.keys for s in kept]))
