"""What a rank's elements on an accelerator add to the counts: every round reads them once and waits for nothing.

What is counted stays on the device until it is fetched, once for all parameters. There are no survivors: to set them
aside, the host would have to know how many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from distprune.selection.competition import Ranges, Standings, add_histogram_on_device
from distprune.selection.counts import NO_END, BinCounts
from distprune.selection.scan import Entry, key_chunks
from distprune.shards import fetched


class DeviceTally:
    """Counts of entries on an accelerator."""

    def __init__(self, standings: Standings, entries: Sequence[Entry]) -> None:
        self._standings, self._entries = standings, entries

    def count_keys(self, counts: BinCounts) -> None:
        """Add the keys inside the ranges, and, on the first look, what is outside."""

        def count(row: torch.Tensor, entry: Entry, within: Ranges) -> None:
            order = self._standings.competitions[entry.competition].order
            needs_scan, low, high = self._standings.needs_scan[entry.competition], *_bounds(within)
            for _, keys in key_chunks(entry, order):
                below, above = keys < low, keys > high
                if needs_scan:
                    row[:3] += torch.stack([below.sum(), above.sum(), (keys > order.last).sum()])
                if counts.wanted == "sum":
                    row[3] += keys.masked_fill(below | above, 0).sum(dtype=torch.int64)
                elif counts.wanted == "ends":
                    wide, beyond = keys.to(torch.int64), below | above
                    ends = [each.masked_fill(beyond, NO_END).max() for each in (-wide, wide)]
                    torch.maximum(row[3:], torch.stack(ends), out=row[3:])
                else:
                    add_histogram_on_device(row[3:], keys, within, ~(below | above))

        self._add(counts, count)

    def count_positions(self, counts: BinCounts) -> None:
        """Add the positions inside the ranges, of elements that tie with the k-th key."""

        def count(row: torch.Tensor, entry: Entry, within: Ranges) -> None:
            order, key = self._standings.competitions[entry.competition].order, self._standings.keys.low
            low, high = _bounds(within)
            for at, keys in key_chunks(entry, order):
                positions = entry.geometry.flat_indices(at.start, at.stop, keys.device) + entry.first_position
                counted = (keys == int(key[entry.competition])) & (positions >= low) & (positions <= high)
                add_histogram_on_device(row[3:], positions, within, counted)

        self._add(counts, count)

    def _add(self, counts: BinCounts, count: Callable[[torch.Tensor, Entry, Ranges], None]) -> None:
        """Add what ``count`` adds for each entry to a row: how many are below, above, and NaN, and the bins."""
        num_rows, num_columns = counts.bins.shape
        there: dict[torch.device, torch.Tensor] = {}
        for entry in self._entries:
            if counts.has(entry.competition):
                device = entry.scores.device
                if device not in there:
                    nothing = torch.zeros((num_rows, 3 + num_columns), dtype=torch.int64, device=device)
                    nothing[:, 3:] = counts.nothing
                    there[device] = nothing
                count(there[device][counts.rows[entry.competition]], entry, counts.of(entry.competition))
        for counted in fetched([*there.values()]):
            counts.beyond += counted[:, :2].numpy()
            counts.num_nans += int(counted[:, 2].sum())
            counts.take(counted[:, 3:].numpy())


def _bounds(within: Ranges) -> tuple[int, int]:
    return int(within.low[0]), int(within.high[0])
