"""What stays of one entry, once its competition is decided.

With k the last key that is pruned and p the last position of an element with that key that is:

    stays = (key > k) | ((key == k) & (position > p))

Positions ascend with local offsets. So the ties that are pruned are those before one offset, the ``edge``, and one
comparison decides each side of it: ``key > k`` before, ``key > k - 1`` from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distprune.host_loops import compiled
from distprune.selection.competition import Standings
from distprune.selection.order import Order
from distprune.selection.put import Put, put_size
from distprune.selection.scan import SMALL, Entry, KeyBits
from distprune.shards import on_host

Array = npt.NDArray[Any]


def decide(standings: Standings, entries: Sequence[Entry], puts: Sequence[Put]) -> list[torch.Tensor]:
    """Put what stays of ``entries``. Local: one read of the scores.

    Return of each how many are pruned, how many of these were gone before, and 0 NaNs, which were looked for: int64, on
    the device of the scores.
    """
    bounds = [_Bound(standings, entry) for entry in entries]
    counts = [*torch.zeros((len(entries), 3), dtype=torch.int64, device="cpu")]
    small: dict[Order, list[int]] = {}
    for i, (entry, bound) in enumerate(zip(entries, bounds, strict=True)):
        if not on_host(entry.scores.device):
            counts[i] = _decide_on_device(entry, bound, puts[i])
        elif entry.geometry.local_numel <= SMALL:
            small.setdefault(bound.order, []).append(i)
        else:
            _decide_large(entry, bound, puts[i], counts[i])
    for order, which in small.items():
        joined = KeyBits(order)
        for part in batches([entries[i].geometry.local_numel for i in which]):
            of_part = [(entries[i], bounds[i], puts[i], counts[i]) for i in which[part]]
            _decide_joined(joined, *zip(*of_part, strict=True))
    return counts


def batches(numels: Sequence[int]) -> Iterator[slice]:
    """Yield which of some small shards on the host, of ``numels`` elements, to decide together. Local."""
    first = total = 0
    for last, numel in enumerate(numels, 1):
        total += numel
        if total >= put_size(torch.device("cpu")) or last == len(numels):
            yield slice(first, last)
            first, total = last, 0


class _Bound:
    """What is pruned of an entry: keys of ``key`` at most before the offset ``edge``, and below it from there on."""

    def __init__(self, standings: Standings, entry: Entry) -> None:
        of, geometry = entry.competition, entry.geometry
        self.order, self.key = standings.competitions[of].order, int(standings.keys.low[of])
        last = int(standings.positions.low[of])
        if standings.only_gone[of]:
            self.key, last = self.order.gone, int(standings.num_positions[of])
        self.edge = geometry.num_before(last + 1 - entry.first_position)

    def parts(self, at: slice) -> list[tuple[slice, int]]:
        """Return the stretches of the elements ``at``, which begin at 0, and the highest key that is pruned there."""
        num = at.stop - at.start
        middle = min(max(self.edge - at.start, 0), num)
        parts = [(slice(0, middle), self.key), (slice(middle, num), self.key - 1)]
        return [(part, key) for part, key in parts if part.start < part.stop]


def _decide_on_device(entry: Entry, bound: _Bound, put: Put) -> torch.Tensor:
    device, numel, order = entry.scores.device, entry.geometry.local_numel, bound.order
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    for start in range(0, numel, put_size(device)):
        at = slice(start, min(start + put_size(device), numel))
        flags, keys = put.flags(at, device), entry.scores.keys(order, at)
        for part, key in bound.parts(at):
            torch.gt(keys[part], key, out=flags[part])
        counts[:2] += torch.stack([(~flags).sum(), (keys < order.first).sum()])
        put.stays(at, flags)
    return counts


def _decide_large(entry: Entry, bound: _Bound, put: Put, counts: torch.Tensor) -> None:
    numel, size, bits_at = entry.geometry.local_numel, put_size(entry.scores.device), KeyBits(bound.order)
    num_pruned = num_gone = 0
    for start in range(0, numel, size):
        at = slice(start, min(start + size, numel))
        bits, magnitude = bits_at([(entry.scores, at)])
        memory = put.bits(at) if bits_at.are_weights else None
        out = put.flags(at, entry.scores.device).numpy() if memory is None else memory
        for part, key in bound.parts(at):
            pruned, gone = _keep_above(bound.order, bits[part], magnitude, key, out[part])
            num_pruned, num_gone = num_pruned + pruned, num_gone + gone
        if memory is None:
            put.stays(at, torch.from_numpy(out))
        else:
            put.left(at, memory)
    counts[0], counts[1] = num_pruned, num_gone


def _decide_joined(
    bits: KeyBits,
    entries: Sequence[Entry],
    bounds: Sequence[_Bound],
    puts: Sequence[Put],
    counts: Sequence[torch.Tensor],
) -> None:
    order, whole = bounds[0].order, [slice(0, entry.geometry.local_numel) for entry in entries]
    keys = bits.keys([(entry.scores, at) for entry, at in zip(entries, whole, strict=True)])
    flags = np.empty(len(keys), dtype=np.bool_)
    any_gone, start = len(keys) and keys.min() < order.first, 0
    for at, bound, put, counted in zip(whole, bounds, puts, counts, strict=True):
        own, stays = keys[start : start + at.stop], flags[start : start + at.stop]
        for part, key in bound.parts(at):
            np.greater(own[part], own.dtype.type(key), out=stays[part])
        numbers = counted.numpy()
        numbers[0] = at.stop - np.count_nonzero(stays)
        if any_gone:
            numbers[1] = np.count_nonzero(own < order.first)
        put.stays(at, torch.from_numpy(stays))
        start += at.stop


def _keep_above(order: Order, bits: Array, magnitude: Any, key: int, out: Array) -> tuple[int, int]:
    """Write into ``out`` which keys are above ``key``, or, if it is not bool, the bits of those, and 0 for the others.

    Return how many are not, and how many are gone.
    """
    first, above = bits.dtype.type(order.first), bits.dtype.type(key)
    if (loops := compiled()) is not None:
        zero = None if out.dtype == np.bool_ else bits.dtype.type(0)
        num_kept, num_gone = loops.keep_above(bits, magnitude, first, above, out, zero)
    else:  # they are keys
        np.greater(bits, above, out=out)
        num_kept, num_gone = int(np.count_nonzero(out)), 0
        if bits.min() < first:
            num_gone = int(np.count_nonzero(bits < first))
    return len(bits) - num_kept, num_gone
