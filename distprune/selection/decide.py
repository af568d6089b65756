"""What stays of one entry, once its competition is decided.

With k the last key that is pruned and p the last position of an element with that key that is:

    stays = (key > k) | ((key == k) & (position > p))

Positions ascend with local offsets. So the ties that are pruned are those before one offset, the ``edge``, and one
comparison decides each side of it: ``key > k`` before, ``key > k - 1`` from there on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distprune.host_loops import compiled
from distprune.selection.competition import Undecided
from distprune.selection.order import Order
from distprune.selection.put import Put, put_size
from distprune.selection.scan import Entry, KeyBits
from distprune.shards import on_host

Array = npt.NDArray[Any]


def decide(entry: Entry, state: Undecided, put: Put) -> torch.Tensor:
    """Put what stays of ``entry``. Local: one read of the scores.

    Return how many are pruned, how many of these were gone before, and 0 NaNs, which were looked for: int64, on the
    device of the scores.
    """
    device, numel = entry.scores.device, entry.geometry.local_numel
    order, key, last = state.competition.order, state.keys.low, state.positions.low
    if state.only_gone:
        key, last = order.gone, state.competition.num_positions
    edge = entry.geometry.num_before(last + 1 - entry.first_position)
    size = min(put_size(device), numel)
    bits_at = KeyBits(entry.scores, order, size) if on_host(device) else None
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    for start in range(0, numel, max(size, 1)):
        at = slice(start, min(start + size, numel))
        middle = min(max(edge - start, 0), at.stop - start)
        parts = [(slice(0, middle), key), (slice(middle, at.stop - start), key - 1)]
        parts = [(part, above) for part, above in parts if part.start < part.stop]
        if bits_at is None:
            flags, keys = put.flags(at, device), entry.scores.keys(order, at)
            for part, above in parts:
                torch.gt(keys[part], above, out=flags[part])
            counts[:2] += torch.stack([(~flags).sum(), (keys < order.first).sum()])
            put.stays(at, flags)
            continue
        memory = put.bits(at) if bits_at.are_weights else None
        out = put.flags(at, device).numpy() if memory is None else memory
        bits, magnitude = bits_at(at)
        for part, above in parts:
            found = _keep_above(order, bits[part], magnitude, above, out[part])
            counts[:2] += torch.tensor(found, dtype=torch.int64, device="cpu")
        if memory is None:
            put.stays(at, torch.from_numpy(out))
        else:
            put.left(at, memory)
    return counts


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
