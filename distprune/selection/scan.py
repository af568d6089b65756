"""One read of the local scores against a bracket of keys: the only pass over all the elements.

Nouns: a *bracket* is the inclusive range of keys in which the threshold is known to lie. Elements
above it stay, elements below it go; those inside are the *survivors*, still undecided.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from distprune.selection.competition import Range, Words
from distprune.selection.order import Order
from distprune.shards import Geometry, chunk_size

__all__ = ["NUM_BELOW", "NUM_COUNTS", "NUM_GONE", "NUM_INSIDE", "NUM_NANS", "Entry", "Keyed", "Survivors", "scan"]

Array = npt.NDArray[Any]

# Counts of elements: below the bracket, inside, above; NaNs (which lie above), gone ones (which lie below).
NUM_BELOW, NUM_INSIDE, NUM_ABOVE, NUM_NANS, NUM_GONE, NUM_COUNTS = range(6)

_LAST_SHORT_START = (1 << 32) - (1 << 22)  # a chunk that starts here or before ends below 2**32
_SPAN = 1 << 20  # elements: below this a second thread costs more than it brings


class Keyed(Protocol):
    """Scores of one local shard as keys, 1-D: of a range of elements, or at local offsets; new, or in ``out``."""

    @property
    def device(self) -> torch.device: ...
    def keys(self, order: Order, at: slice | torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


@dataclass(frozen=True)
class Entry:
    """One parameter's local elements in a competition."""

    name: str
    scores: Keyed
    geometry: Geometry
    owned: bool
    competition: int
    first_position: int  # the place, among the competition's positions, of flat index 0


@dataclass(frozen=True)
class Survivors:
    """Undecided local elements: their offsets in the shard and their keys, in ascending offset order."""

    offsets: Array  # uint32, or int64 where that is too short
    keys: Array  # the order's key dtype


def scan(
    entry: Entry,
    order: Order,
    bracket: Range,
    mask: torch.Tensor | None = None,
    offsets: tuple[int, int] | None = None,
) -> Iterator[tuple[Words, Survivors]]:
    """Yield counts and survivors of the local elements, which are on the CPU, chunk by chunk in order.

    ``offsets``: only those from the first of the two to before the second; by default all of them.

    ``mask`` (bool, contiguous, local shape), where given, is written on the way: True above the
    bracket, False below it, True at survivors, to be settled later.
    """
    begin, end = offsets or (0, entry.geometry.local_numel)
    flat_mask = mask.view(-1) if mask is not None else None
    step = chunk_size(entry.scores.device)

    memory = threading.local()

    def one(start: int) -> tuple[Words, Survivors]:
        if not hasattr(memory, "keys"):  # a fresh tensor for each chunk would be as slow as the scan
            memory.keys = torch.empty(step, dtype=order.key_dtype)
            memory.flags = np.empty((2, step), dtype=np.bool_)
        stop = min(start + step, end)
        out = flat_mask[start:stop].numpy() if flat_mask is not None else None
        keys = entry.scores.keys(order, slice(start, stop), memory.keys).numpy()
        return _scan_chunk(order, keys, bracket, memory.flags, out, start)

    starts = range(begin, end, step)
    num_threads = min(torch.get_num_threads(), (end - begin) // _SPAN)
    if num_threads <= 1:
        yield from map(one, starts)
        return
    # numpy lets go of the interpreter lock; torch's own threads would sit idle meanwhile.
    with ThreadPoolExecutor(num_threads) as pool:
        ahead = 4 * num_threads  # chunks in flight, so that survivors waiting to be taken stay few
        for first in range(0, len(starts), ahead):
            yield from pool.map(one, starts[first : first + ahead])


def _scan_chunk(
    order: Order, keys: Array, bracket: Range, flags: Array, out: Array | None, start: int
) -> tuple[Words, Survivors]:
    low, high = keys.dtype.type(bracket.low), keys.dtype.type(bracket.high)
    above, inside = flags[:, : len(keys)]
    # True from the bracket on, which is what the mask says until survivors are settled.
    kept = np.greater_equal(keys, low, out=out if out is not None else np.empty(len(keys), dtype=np.bool_))
    np.greater(keys, high, out=above)
    np.not_equal(kept, above, out=inside)
    offsets = np.flatnonzero(inside)
    num_kept = int(np.count_nonzero(kept))
    # Two extremes take less than two counts, and as a rule say that there is nothing to count.
    num_nans = int(np.count_nonzero(keys > order.last)) if keys.max() > order.last else 0
    num_gone = int(np.count_nonzero(keys < order.first)) if keys.min() < order.first else 0
    counts = [len(keys) - num_kept, len(offsets), num_kept - len(offsets), num_nans, num_gone]
    return np.array(counts), Survivors(_shortened(offsets, start), keys[offsets])


def _shortened(offsets: Array, start: int) -> Array:
    """Return offsets in the shard, in four bytes each wherever the chunk's do not need more."""
    if start > _LAST_SHORT_START:
        return offsets + start
    short = offsets.astype(np.uint32)
    short += np.uint32(start)
    return short
