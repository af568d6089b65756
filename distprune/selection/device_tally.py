"""A tally on an accelerator: every round reads the shard once and waits for nothing.

What is counted stays on the device until the round's message is fetched, once for all parameters. There are no
survivors: to set them aside, the host would have to know how many they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from distprune.selection.competition import Undecided, add_histogram_on_device
from distprune.selection.scan import NUM_COUNTS, Entry
from distprune.shards import chunk_size

__all__ = ["DeviceTally"]


class DeviceTally:
    """Counts of one entry on its device."""

    def __init__(self, entry: Entry, state: Undecided) -> None:
        self.entry = entry
        device = entry.scores.device
        self._num_nans = torch.zeros((), dtype=torch.int64, device=device)
        self._state = state

    def num_nans(self) -> torch.Tensor:
        """Return how many local scores are NaN, int64, on the device."""
        return self._num_nans

    def count_keys(self, row: torch.Tensor) -> None:
        """Add the owned keys inside the state's range to ``row``; on the first look, what lies outside too."""
        state = self._state
        if state.is_key_known or state.only_gone:
            return
        order, within = state.competition.order, state.keys
        if state.needs_scan:
            self._num_nans.zero_()
        for _, _, keys in self._chunks():
            below, above = keys < within.low, keys > within.high
            if state.needs_scan:
                num_below, num_above = below.sum(), above.sum()
                beyond = torch.stack([(keys > order.last).sum(), (keys < order.first).sum()])  # NaNs, gone
                self._num_nans += beyond[0]
                if self.entry.owned:
                    within_or_not = torch.stack([num_below, len(keys) - num_below - num_above, num_above])
                    row[:NUM_COUNTS] += torch.cat([within_or_not, beyond])
            if self.entry.owned:
                add_histogram_on_device(row[NUM_COUNTS:], keys, within, ~(below | above))

    def narrow(self) -> None:
        """Do nothing: nothing is set aside."""

    def count_positions(self, row: torch.Tensor) -> None:
        """Add the owned positions inside the state's range, of elements that tie with the k-th key."""
        if not self.entry.owned or self._state.only_gone:
            return
        within = self._state.positions
        for start, stop, keys in self._chunks():
            positions = self._positions(start, stop)
            counted = (keys == self._state.keys.low) & (positions >= within.low) & (positions <= within.high)
            add_histogram_on_device(row, positions, within, counted)

    def _positions(self, start: int, stop: int) -> torch.Tensor:
        return self.entry.geometry.flat_indices(start, stop, self.entry.scores.device) + self.entry.first_position

    def _chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        numel, step = self.entry.geometry.local_numel, chunk_size(self.entry.scores.device)
        for start in range(0, numel, step):
            stop = min(start + step, numel)
            yield start, stop, self.entry.scores.keys(self._state.competition.order, slice(start, stop))
