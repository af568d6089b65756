"""A bracket of keys that holds the k-th lowest with near certainty, from two small samples.

First round, *slots*: a fixed number of positions, one drawn in every equal stretch of a competition;
whoever owns the element puts its key in the slot. Second round, *strides*: every n-th local element,
counted in bins over the bracket the slots gave. Nothing here decides anything; a bad bracket costs
one more pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives import Communicator
from distprune.selection.competition import Range, Undecided, Words, add_histogram, add_histogram_on_device
from distprune.selection.counts import summed_counts
from distprune.selection.scan import Entry
from distprune.shards import on_host, sent

_MARGIN = 4.0  # standard deviations of a binomial count on either side: a miss is one in ten thousand
_MIN_STRIDE, _MAX_STRIDE, _STRIDE_SAMPLE = 16, 256, 1 << 17  # elements
_MOST_SLOTS_A_POSITION = 8  # where there are fewer elements than slots
_NUM_STRIDE_HEADER = 2  # sampled in all, sampled below the bracket


def sample_brackets(
    comm: Communicator, states: Sequence[Undecided], entries: Callable[[], Sequence[Entry]], num_words: int
) -> None:
    """Set the key range of every state to its bracket: two rounds of ``num_words`` int64 a competition."""
    for fill, bracket in ((_fill_slots, _bracket_of_slots), (_count_strides, _bracket_of_strides)):
        for state, row in zip(states, summed_counts(comm, states, num_words, entries, fill), strict=True):
            # What is gone comes before all others: a bracket of those that compete begins above it.
            keys, first = bracket(state, row), state.competition.order.first
            state.keys = Range(max(keys.low, first), max(keys.high, first))


def _fill_slots(row: torch.Tensor, entry: Entry, state: Undecided) -> None:
    positions = _slot_positions(len(row), state.competition.num_positions)
    first = entry.first_position
    start, stop = np.searchsorted(positions, (first, first + entry.geometry.global_numel))
    offsets, held = entry.geometry.local_offsets_at(positions[start:stop] - first)
    keys = _keys_at(entry, state, sent(torch.from_numpy(offsets[held]), row.device))
    row[sent(torch.from_numpy(start + np.flatnonzero(held)), row.device)] = _encode(keys, state)


@lru_cache(maxsize=64)
def _slot_positions(num_slots: int, num_positions: int) -> npt.NDArray[np.int64]:
    """Return the position that each slot samples, in order: one in every equal stretch."""
    num_slots = min(num_slots, _MOST_SLOTS_A_POSITION * num_positions)
    slot = np.arange(num_slots)
    # At a place within its stretch that no period of the data can follow (Weyl sequence).
    jitter = slot * 0x9E3779B9 % (1 << 32) / (1 << 32)
    scale = num_positions / max(num_slots, 1)
    return np.minimum((slot + jitter) * scale, num_positions - 1).astype(np.int64)


def _keys_at(entry: Entry, state: Undecided, offsets: torch.Tensor) -> torch.Tensor:
    return entry.scores.keys(state.competition.order, offsets).to(torch.int64)


def _shift(state: Undecided) -> int:
    return 2 if state.competition.order.key_dtype == torch.int64 else 0


def _encode(keys: torch.Tensor, state: Undecided) -> torch.Tensor:
    """Keys as positive numbers (0 is an empty slot); 64-bit keys lose two bits to make room."""
    lowest = state.competition.order.gone >> _shift(state)
    return ((keys >> _shift(state)) - lowest + 1).clamp_(min=1)


def _decode(code: int, state: Undecided) -> int:
    return (code - 1 + (state.competition.order.gone >> _shift(state))) << _shift(state)


def _fraction(state: Undecided) -> float:
    return state.competition.num_lowest / max(state.competition.num_positions, 1)


def _ranks(num_sampled: int, fraction: float) -> tuple[float, float]:
    margin = _MARGIN * math.sqrt(num_sampled * fraction * (1 - fraction)) + _MARGIN
    return fraction * num_sampled - margin, fraction * num_sampled + margin


def _bracket_of_slots(state: Undecided, row: Words) -> Range:
    order = state.competition.order
    codes = np.sort(row[row > 0])
    below, above = _ranks(len(codes), _fraction(state))
    low = order.gone if below < 1 else _decode(int(codes[math.floor(below) - 1]), state)
    high = order.last
    if math.ceil(above) < len(codes):
        high = _decode(int(codes[math.ceil(above)]), state) + (1 << _shift(state)) - 1
    return Range(low, min(high, order.last))


def _count_strides(row: torch.Tensor, entry: Entry, state: Undecided) -> None:
    numel = entry.geometry.local_numel
    # Odd, so that it walks through the columns of matrices whose width is a power of two.
    stride = min(max(state.competition.num_positions // _STRIDE_SAMPLE, _MIN_STRIDE), _MAX_STRIDE) | 1
    step = stride * _STRIDE_SAMPLE
    bins = row[_NUM_STRIDE_HEADER:]
    for start in range(0, numel, step):
        keys = _keys_at(entry, state, torch.arange(start, min(start + step, numel), stride, device=row.device))
        inside = (keys >= state.keys.low) & (keys <= state.keys.high)
        row[:_NUM_STRIDE_HEADER] += torch.stack([torch.ones_like(keys).sum(), (keys < state.keys.low).sum()])
        if on_host(row.device):
            add_histogram(bins, keys[inside], state.keys)
        else:
            add_histogram_on_device(bins, keys, state.keys, inside)


def _bracket_of_strides(state: Undecided, row: Words) -> Range:
    bins = row[_NUM_STRIDE_HEADER:]
    passed = row[1] + np.cumsum(bins)
    below, above = _ranks(int(row[0]), _fraction(state))
    low, high = state.keys.low, state.keys.high
    first_bin, last_bin = int(np.searchsorted(passed, below)), int(np.searchsorted(passed, above))
    if below > row[1] and first_bin < len(bins):
        low = state.keys.bin(first_bin, len(bins)).low
    if last_bin < len(bins):
        high = max(state.keys.bin(last_bin, len(bins)).high, low)
    return Range(low, high)
