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

from distprune.collectives import Communicator, max_together
from distprune.selection.competition import Keys, Ranges, Standings, Words
from distprune.selection.order import Order
from distprune.selection.scan import Entry, KeyBits
from distprune.shards import batches, fetched, is_small

_MANY = 1 << 7  # competitions: fewer share so many bins a round that a bracket brings little
_SAMPLE = 1 << 14  # elements of one entry
_UNKNOWN = torch.iinfo(torch.int64).min
_MISSES = 3e-5  # the share of brackets that miss on either side, where ranks hold random parts


def tell_quantiles(comm: Communicator, standings: Standings, entries: Callable[[], Sequence[Entry]]) -> bool:
    """Set the keys of all competitions to their brackets, if there are many; return whether that was done.

    Every rank must call it: one round of 16 bytes a competition.
    """
    num = len(standings.competitions)
    if num < _MANY:
        return False

    def fill(words: torch.Tensor) -> None:
        less_lows, highs = words.fill_(_UNKNOWN).numpy()
        for of, low, high in _quantiles(comm.size, standings, entries()):
            np.maximum.at(less_lows, of, -low)
            np.maximum.at(highs, of, high)

    less_lows, highs = max_together(comm, (2, num), fill).numpy()
    known = np.flatnonzero(highs > _UNKNOWN)
    standings.keys.put(known, Ranges(-less_lows[known], highs[known]))
    return True


def _quantiles(num_ranks: int, standings: Standings, entries: Sequence[Entry]) -> Iterator[tuple[Words, Words, Words]]:
    """Yield competitions, and for each the keys of this rank's bracket, of entries that are large enough to say."""
    groups: dict[tuple[Order, int], list[Entry]] = {}
    single: list[tuple[Entry, torch.Tensor]] = []
    for entry in entries:
        competition, numel = standings.competitions[entry.competition], entry.geometry.local_numel
        if not numel or 2 * numel * num_ranks < competition.num_positions:
            continue
        if is_small(numel, entry.scores.device):
            groups.setdefault((competition.order, numel), []).append(entry)
        else:
            sampled = slice(0, numel, (numel // _SAMPLE) | 1)
            single.append((entry, entry.keys(competition.order, sampled)))
    for (order, numel), of_group in groups.items():
        bits = KeyBits(order)
        for which in batches(range(len(of_group)), [numel] * len(of_group)):
            keys = bits.keys([of_group[i].whole for i in which]).reshape(-1, numel)
            yield _bracket(standings, [of_group[i] for i in which], np.sort(keys, axis=1))
    for (entry, _), sample in zip(single, fetched([keys for _, keys in single]), strict=True):
        yield _bracket(standings, [entry], np.sort(sample.numpy())[None])


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
