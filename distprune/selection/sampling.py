"""A bracket of keys that holds the k-th lowest with near certainty, from a sample of every n-th element.

The sample is drawn once. Each round counts it in equal bins of the bracket that is left, and keeps those between two
elements of the sample: one that is hardly after the k-th of all, and one that is hardly before it. Nothing here decides
anything; a bad bracket costs one more pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from distprune.collectives.base import Communicator
from distprune.selection.competition import Keys, Ranges, Standings, Words
from distprune.selection.counts import BinCounts, summed_counts
from distprune.selection.order import Order
from distprune.selection.scan import Entry, keys_of
from distprune.shards.device import fetched, is_joined, on_host

_WORTH = 1 << 21  # elements of a rank, on average: fewer are all set aside, and no bracket is needed
_MARGIN = 4.0  # standard deviations of a binomial count on either side: a miss is one in ten thousand
_MIN_STRIDE, _MAX_STRIDE, _STRIDE_SAMPLE = 16, 256, 1 << 17  # elements
_LOCAL_SAMPLE = 1 << 22  # of one rank, on average; where a rank has far more, each stands for several
_MOST_ROUNDS = 6

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Sample:
    keys: Keys
    of: Words | None  # the competition of each, if there are several
    weight: int  # how many each stands for


def sample_brackets(comm: Communicator, standings: Standings, entries: Callable[[], Sequence[Entry]]) -> None:
    """Set the keys of all competitions to their brackets, where sampling is worth it. Every rank must call it.

    Two rounds as a rule, six at most.
    """
    num_per_rank = int(standings.num_positions.sum()) // comm.size
    if num_per_rank <= _WORTH:
        return
    num, brackets = len(standings.competitions), standings.keys
    fraction, left = _fraction(standings), np.arange(num)
    num_below = np.zeros_like(standings.num_positions)
    num_sampled: Words | None = None
    sample: list[_Sample] = []

    def count(counts: BinCounts) -> None:
        if not sample:
            sample.append(_drawn(standings, entries(), max(_MAX_STRIDE, num_per_rank // _LOCAL_SAMPLE)))
        keys, of, weight = sample[0].keys, sample[0].of, sample[0].weight
        if num_sampled is None:  # the first round: what is below is gone
            is_gone = keys < brackets.low[0 if of is None else of]
            num_gone = is_gone.sum() if of is None else np.bincount(of[is_gone], minlength=num)
            counts.beyond[:, 0] = num_gone * weight
        inside = brackets.hold(keys, of)
        counts.add(keys[inside], None if of is None else of[inside], weight)

    for _ in range(_MOST_ROUNDS):
        is_first = num_sampled is None
        most = int((standings.num_positions if num_sampled is None else num_sampled)[left].max())
        within = brackets.at(left)
        found = summed_counts(comm, num, left, within, most, count, with_beyond=is_first)
        if num_sampled is None:
            num_below[:] = found.beyond[:, 0]
            num_sampled = num_below + found.bins.sum(1)
        left = _narrowed(brackets, num_below, left, found.bins, num_sampled[left], fraction[left])
        if not len(left):
            break


def _fraction(standings: Standings) -> Floats:
    return np.asarray(standings.num_lowest / np.maximum(standings.num_positions, 1))


def _drawn(standings: Standings, entries: Sequence[Entry], max_stride: int) -> _Sample:
    """Return every n-th element of this rank's part of each competition. One wait for a device."""
    numels = np.array([entry.geometry.local_numel for entry in entries], dtype=np.int64)
    of = np.array([entry.competition for entry in entries], dtype=np.int64)
    strides = np.clip(standings.num_positions // _STRIDE_SAMPLE, _MIN_STRIDE, max_stride)
    weight = int((numels // strides[of]).sum()) // (2 * _LOCAL_SAMPLE) + 1
    # Odd, so that it walks through the columns of matrices whose width is a power of two.
    strides = (strides * weight) | 1
    passed = np.zeros_like(strides)  # by competition, the elements before
    found: list[torch.Tensor] = []
    nums: list[tuple[int, int]] = []  # competitions, and how many of each are found
    joined: dict[tuple[Order, torch.device], list[tuple[Entry, slice]]] = {}  # small ones on a device
    for entry in entries:
        competition, numel, device = entry.competition, entry.geometry.local_numel, entry.scores.device
        order, stride = standings.competitions[competition].order, int(strides[competition])
        for start in range(int(-passed[competition] % stride), numel, stride * _STRIDE_SAMPLE):
            at = slice(start, min(start + stride * _STRIDE_SAMPLE, numel), stride)
            if is_joined(numel, device) and not on_host(device):
                joined.setdefault((order, device), []).append((entry, at))
            else:
                found.append(entry.keys(order, at))
                nums.append((competition, len(found[-1])))
        passed[competition] += numel
    for (order, _), pieces in joined.items():
        found.append(keys_of(order, [(entry.scores, at) for entry, at in pieces]))
        nums += ((entry.competition, len(range(at.start, at.stop, at.step))) for entry, at in pieces)
    keys = np.concatenate([np.empty(0, dtype=standings.key_dtype), *(each.numpy() for each in fetched(found))])
    return _Sample(keys, np.repeat(*np.array(nums, np.int64).reshape(-1, 2).T) if len(strides) > 1 else None, weight)


def _narrowed(
    brackets: Ranges, num_below: Words, left: Words, bins: Words, num_sampled: Words, fraction: Floats
) -> Words:
    """Narrow the brackets that are ``left`` by one round of counts; return those for which another is worth it."""
    margin = _MARGIN * np.sqrt(num_sampled * fraction * (1 - fraction)) + _MARGIN
    passed = num_below[left, None] + np.cumsum(bins, axis=1)
    lowest, highest = num_sampled * fraction - margin, num_sampled * fraction + margin
    first = np.minimum((passed < np.floor(lowest)[:, None]).sum(1), bins.shape[1] - 1)
    last = np.minimum((passed <= np.ceil(highest)[:, None]).sum(1), bins.shape[1] - 1)
    at_first, at_last = (np.take_along_axis(passed, index[:, None], 1)[:, 0] for index in (first, last))
    num_below[left] = at_first - np.take_along_axis(bins, first[:, None], 1)[:, 0]
    before = brackets.at(left)
    narrowed = before.bins(first, last, bins.shape[1])
    brackets.put(left, narrowed)
    is_wide = at_last - num_below[left] > 4 * margin  # twice what is inside at best
    is_narrower = (narrowed.low > before.low) | (narrowed.high < before.high)
    return left[is_wide & is_narrower & ~narrowed.are_one]
