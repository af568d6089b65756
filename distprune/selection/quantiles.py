"""A bracket of keys for each of many competitions, in one round: between the k-th lowest of one rank and of another.

Every rank tells, of its own part of each, the elements at the share of the k-th, less and more a margin. The k-th of
all is not before the lowest of these, nor after the highest. Nothing here decides anything: see ``sampling``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from statistics import NormalDist

import numpy as np
import torch

from distprune.collectives.base import Communicator
from distprune.selection.competition import Keys, Standings, Words
from distprune.selection.counts import NO_END, told_ranges
from distprune.selection.order import Order
from distprune.selection.scan import Entry, KeyBits, keys_of
from distprune.shards.device import batches, fetched, is_joined, is_small

_MANY = 1 << 7  # competitions: fewer share so many bins a round that a bracket brings little
_SAMPLE = 1 << 14  # elements of one entry
_JOINED_SAMPLE = 1 << 10  # of one that is read together with others on a device,
_MOST_JOINED = 1 << 22  # and of all of these, or one for each
_MISSES = 3e-5  # the share of brackets that miss on either side, where ranks hold random parts


def tell_quantiles(comm: Communicator, standings: Standings, entries: Callable[[], Sequence[Entry]]) -> bool:
    """Set the keys of all competitions to their brackets, if there are many; return whether that was done.

    Every rank must call it: one round of 16 bytes a competition.
    """
    num = len(standings.competitions)
    if num < _MANY:
        return False

    def fill(ends: Words) -> None:
        less_lows, highs = ends
        for of, low, high in _quantiles(comm.size, standings, entries()):
            np.maximum.at(less_lows, of, -low)
            np.maximum.at(highs, of, high)

    told = told_ranges(comm, num, fill)
    known = np.flatnonzero(told.high > NO_END)
    standings.keys.put(known, told.at(known))
    return True


def _quantiles(num_ranks: int, standings: Standings, entries: Sequence[Entry]) -> Iterator[tuple[Words, Words, Words]]:
    """Yield competitions, and for each the keys of this rank's bracket, of entries that are large enough to say."""
    groups: dict[tuple[Order, int], list[Entry]] = {}
    joined: dict[tuple[Order, torch.device], list[Entry]] = {}
    sampled: list[tuple[list[Entry], list[int], torch.Tensor]] = []  # and how many keys are of each
    for entry in entries:
        competition, numel = standings.competitions[entry.competition], entry.geometry.local_numel
        if not numel or 2 * numel * num_ranks < competition.num_positions:
            continue
        if is_small(numel, entry.scores.device):
            groups.setdefault((competition.order, numel), []).append(entry)
        elif is_joined(numel, entry.scores.device):
            joined.setdefault((competition.order, entry.scores.device), []).append(entry)
        else:
            sample = entry.keys(competition.order, slice(0, numel, (numel // _SAMPLE) | 1))
            sampled.append(([entry], [len(sample)], sample))
    for (order, numel), of_group in groups.items():
        bits = KeyBits(order)
        for which in batches(range(len(of_group)), [numel] * len(of_group)):
            keys = bits([of_group[i].whole for i in which]).reshape(-1, numel)
            yield _bracket(standings, [of_group[i] for i in which], np.sort(keys, axis=1))
    for (order, _), of_device in joined.items():
        most = max(1, min(_JOINED_SAMPLE, _MOST_JOINED // len(of_device)))
        steps = [(entry.geometry.local_numel // most) | 1 for entry in of_device]
        ats = [slice(0, entry.geometry.local_numel, step) for entry, step in zip(of_device, steps, strict=True)]
        nums = [len(range(at.stop)[at]) for at in ats]
        for which in batches(range(len(nums)), nums):
            sample = keys_of(order, [(of_device[i].scores, ats[i]) for i in which])
            sampled.append(([of_device[i] for i in which], [nums[i] for i in which], sample))
    for (together, nums, _), sample in zip(sampled, fetched([sample for *_, sample in sampled]), strict=True):
        parts = np.split(sample.numpy(), np.cumsum(nums)[:-1])
        for num in set(nums):
            which = [i for i, of_entry in enumerate(nums) if of_entry == num]
            yield _bracket(standings, [together[i] for i in which], np.sort([parts[i] for i in which], axis=1))


def _bracket(standings: Standings, entries: Sequence[Entry], keys: Keys) -> tuple[Words, Words, Words]:
    """Return the competitions of ``entries``, and brackets from samples of equal size, sorted: (entries, sample)."""
    of, num = np.array([entry.competition for entry in entries]), keys.shape[1]
    numels = np.array([entry.geometry.local_numel for entry in entries])
    num_positions = standings.num_positions[of]
    fraction = standings.num_lowest[of] / num_positions
    margin = np.array([_margin(int(r)) for r in num_positions // numels]) * np.sqrt(num * fraction * (1 - fraction))
    first = np.floor(num * fraction - margin).astype(np.int64) - 1
    last = np.maximum(np.ceil(num * fraction + margin).astype(np.int64) - 1, 0)
    everything, rows = standings.all_keys.at(of), np.arange(len(entries))
    low, high = keys[rows, np.maximum(first, 0)], keys[rows, np.minimum(last, num - 1)]
    return (
        of,
        np.where(first < 0, everything.low, np.maximum(low, everything.low)),
        np.where(last >= num, everything.high, np.clip(high, everything.low, everything.high)),
    )


@cache
def _margin(num_ranks: int) -> float:
    """Return how many standard deviations each of so many ranks adds on either side. With many all differ enough."""
    return max(0.0, -NormalDist().inv_cdf(math.exp(math.log(_MISSES) / max(num_ranks, 1))))
