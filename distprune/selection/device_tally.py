"""What an entry on an accelerator adds to the counts: every round reads the shard once and waits for nothing.

What is counted stays on the device until the round's message is fetched, once for all parameters. There are no
survivors: to set them aside, the host would have to know how many they are.
"""

from __future__ import annotations

import torch

from distprune.selection.competition import Undecided, add_histogram_on_device
from distprune.selection.scan import NUM_COUNTS, Entry, key_chunks


def count_keys_on_device(row: torch.Tensor, entry: Entry, state: Undecided) -> None:
    """Add the keys inside the state's range to ``row``; on the first look, what lies outside too."""
    if state.is_key_known or state.only_gone:
        return
    order, within = state.competition.order, state.keys
    for _, keys in key_chunks(entry, order):
        below, above = keys < within.low, keys > within.high
        if state.needs_scan:
            num_below, num_above = below.sum(), above.sum()
            num_inside = len(keys) - num_below - num_above
            num_nans, num_gone = (keys > order.last).sum(), (keys < order.first).sum()
            row[:NUM_COUNTS] += torch.stack([num_below, num_inside, num_above, num_nans, num_gone])
        add_histogram_on_device(row[NUM_COUNTS:], keys, within, ~(below | above))


def count_positions_on_device(row: torch.Tensor, entry: Entry, state: Undecided) -> None:
    """Add the positions inside the state's range, of elements that tie with the k-th key."""
    if state.only_gone:
        return
    within = state.positions
    for at, keys in key_chunks(entry, state.competition.order):
        positions = entry.geometry.flat_indices(at.start, at.stop, entry.scores.device) + entry.first_position
        counted = (keys == state.keys.low) & (positions >= within.low) & (positions <= within.high)
        add_histogram_on_device(row, positions, within, counted)
