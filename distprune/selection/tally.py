"""What an entry on the CPU adds to the counts. Survivors are set aside where they are few."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from distprune.selection.competition import Undecided, Words, add_histogram
from distprune.selection.scan import NUM_COUNTS, Entry, Survivors, scan

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
        self._entry = entry
        self._state = state
        self._memory = memory
        self._survivors: Survivors | None = None

    def count_keys(self, row: torch.Tensor) -> None:
        """Add the keys inside the state's range to ``row``; on the first look, what lies outside too."""
        self._narrow()
        if self._survivors is not None:
            self._add_keys(row, self._survivors)
        elif not (self._state.is_key_known or self._state.only_gone):  # else nothing is left to learn
            counts = self._scan_keys(row)
            if self._state.needs_scan:
                row[:NUM_COUNTS] += torch.from_numpy(counts)

    def _scan_keys(self, row: torch.Tensor) -> Words:
        total = np.zeros(NUM_COUNTS, dtype=np.int64)
        kept: list[Survivors] | None = []
        for counts, found in scan(self._entry, self._state.competition.order, self._state.keys):
            total += counts
            if kept is not None and self._memory.take(found.num_bytes):
                kept.append(found)
                continue
            for survivors in kept or ():  # too many to keep: count them as they come
                self._memory.num_bytes += survivors.num_bytes
                self._add_keys(row, survivors)
            kept = None
            self._add_keys(row, found)
        if kept is not None:
            self._survivors = _joined(kept)
            self._add_keys(row, self._survivors)
        return total

    def _add_keys(self, row: torch.Tensor, found: Survivors) -> None:
        if len(found.keys):
            add_histogram(row[NUM_COUNTS:], torch.from_numpy(found.keys), self._state.keys)

    def _narrow(self) -> None:
        """Set aside only the survivors that the last round over the keys did not decide."""
        if self._survivors is None:
            return
        self._memory.num_bytes += self._survivors.num_bytes
        if self._state.needs_scan:  # the bracket missed
            self._survivors = None
            return
        keys, offsets = self._survivors.keys, self._survivors.offsets
        left = (keys >= self._state.keys.low) & (keys <= self._state.keys.high)
        self._survivors = Survivors(offsets[left], keys[left])
        self._memory.num_bytes -= self._survivors.num_bytes

    def count_positions(self, row: torch.Tensor) -> None:
        """Add the positions inside the state's range, of elements that tie with the k-th key."""
        self._narrow()
        if self._state.only_gone:
            return
        within = self._state.positions
        for survivors in self._ties():
            offsets = torch.from_numpy(survivors.offsets.astype(np.int64, copy=False))
            positions = self._entry.geometry.flat_indices_at(offsets) + self._entry.first_position
            inside = positions[(positions >= within.low) & (positions <= within.high)]
            if len(inside):
                add_histogram(row, inside, within)

    def _ties(self) -> Iterable[Survivors]:
        """Return the elements whose key is the k-th: all that are within the state's positions, and maybe others."""
        if self._survivors is not None:
            return [self._survivors]
        geometry, within, offsets = self._entry.geometry, self._state.positions, None
        if geometry.flat_start is not None:
            first, numel = self._entry.first_position + geometry.flat_start, geometry.local_numel
            offsets = min(max(within.low - first, 0), numel), min(max(within.high + 1 - first, 0), numel)
        found = scan(self._entry, self._state.competition.order, self._state.keys, offsets=offsets)
        return (survivors for _, survivors in found)


def _joined(kept: list[Survivors]) -> Survivors:
    if not kept:
        return Survivors(np.empty(0, dtype=np.uint32), np.empty(0, dtype=np.int64))
    return Survivors(np.concatenate([s.offsets for s in kept]), np.concatenate([s.keys for s in kept]))
