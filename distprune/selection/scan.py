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

from distprune.host_loops import compiled
from distprune.selection.competition import Range, Words
from distprune.selection.order import Order
from distprune.shards import Geometry, chunk_size

Array = npt.NDArray[Any]

# Counts of elements: below the bracket, inside, above; NaNs (which lie above), gone ones (which lie below).
NUM_BELOW, NUM_INSIDE, NUM_ABOVE, NUM_NANS, NUM_GONE, NUM_COUNTS = range(6)

_LAST_SHORT_START = (1 << 32) - (1 << 22)  # a chunk that starts here or before ends below 2**32
_NUM_CHUNKS = 4  # at a time: what Python does between takes longer than a larger cache
_SPAN = 1 << 20  # elements: below this a second thread costs more than it brings


class Keyed(Protocol):
    """Scores of one local shard as keys, 1-D: of a range of elements, or at local offsets; new, or in ``out``.

    On the host ``bits`` may give the weights' own bits, which make all of them by ``&``.
    """

    @property
    def device(self) -> torch.device: ...
    def keys(self, order: Order, at: slice | torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...
    def bits(self, order: Order) -> tuple[Array, Any] | None: ...


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

    @property
    def num_bytes(self) -> int:
        return int(self.offsets.nbytes + self.keys.nbytes)


class KeyBits:
    """Integers of which ``&`` makes the keys of one shard's elements, on the host, range by range.

    Where compiled loops read them they are the weights' own bits, if that is possible; else the keys, in memory for
    ``size`` of them.
    """

    def __init__(self, scores: Keyed, order: Order, size: int) -> None:
        self._scores, self._order = scores, order
        self._all = scores.bits(order) if compiled() is not None else None
        self.are_weights = self._all is not None
        self._memory = torch.empty(size if self._all is None else 0, dtype=order.key_dtype, device="cpu")

    def __call__(self, at: slice) -> tuple[Array, Any]:
        """Return the integers at ``at``, and what they are to be combined with."""
        if self._all is not None:
            return self._all[0][at], self._all[1]
        keys = self._scores.keys(self._order, at, self._memory).numpy()
        return keys, keys.dtype.type(-1)


def key_chunks(entry: Entry, order: Order) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield local offsets and the keys there, chunk by chunk, on the device of the scores."""
    numel, step = entry.geometry.local_numel, chunk_size(entry.scores.device)
    for start in range(0, numel, step):
        at = slice(start, min(start + step, numel))
        yield at, entry.scores.keys(order, at)


def scan(
    entry: Entry, order: Order, bracket: Range, offsets: tuple[int, int] | None = None
) -> Iterator[tuple[Words, Survivors]]:
    """Yield counts and survivors of the local elements, which are on the CPU, chunk by chunk in order.

    ``offsets``: only those from the first of the two to before the second; by default all of them.
    """
    begin, end = offsets or (0, entry.geometry.local_numel)
    step = chunk_size(entry.scores.device) * _NUM_CHUNKS

    own = threading.local()

    def one(start: int) -> tuple[Words, Survivors]:
        if not hasattr(own, "scan"):  # fresh memory for each chunk would be as slow as the scan
            own.scan = _ChunkScan(entry.scores, order, bracket, step)
        found: tuple[Words, Survivors] = own.scan(slice(start, min(start + step, end)))
        return found

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


class _ChunkScan:
    """Scans one chunk after the other, of up to ``size`` elements, in the same memory."""

    def __init__(self, scores: Keyed, order: Order, bracket: Range, size: int) -> None:
        self._order, self._bits = order, KeyBits(scores, order, size)
        self._loops = compiled()
        dtype = torch.empty(0, dtype=order.key_dtype, device="cpu").numpy().dtype
        self._low, self._high = dtype.type(bracket.low), dtype.type(bracket.high)
        if self._loops is None:
            self._flags = np.empty((3, size), dtype=np.bool_)
        else:
            self._offsets, self._inside = np.empty(size, dtype=np.int64), np.empty(size, dtype=dtype)

    def __call__(self, at: slice) -> tuple[Words, Survivors]:
        """Return counts and survivors at ``at``."""
        num = at.stop - at.start
        bits, magnitude = self._bits(at)
        if self._loops is not None:
            num_kept, num_inside, lowest, highest = self._loops.find_inside(
                bits, magnitude, self._low, self._high, self._offsets, self._inside
            )
            offsets, found = self._offsets[:num_inside], self._inside[:num_inside].copy()
        else:
            above, inside, kept = self._flags[:, :num]
            np.greater_equal(bits, self._low, out=kept)
            np.greater(bits, self._high, out=above)
            np.not_equal(kept, above, out=inside)
            offsets = np.flatnonzero(inside)
            num_kept, found = int(np.count_nonzero(kept)), bits[offsets]
            lowest, highest = bits.min(), bits.max()  # less than two counts, and as a rule there is nothing to count
        beyond = count_beyond(self._order, bits, magnitude, lowest, highest)
        counts = [num - num_kept, len(offsets), num_kept - len(offsets), *beyond]
        return np.array(counts), Survivors(_shortened(offsets, at.start), found)


def count_beyond(order: Order, bits: Array, magnitude: Any, lowest: Any, highest: Any) -> tuple[int, int]:
    """Return how many keys are of NaN, and of what is gone, given the lowest and the highest."""
    num_nans = int(np.count_nonzero((bits & magnitude) > order.last)) if highest > order.last else 0
    num_gone = int(np.count_nonzero((bits & magnitude) < order.first)) if lowest < order.first else 0
    return num_nans, num_gone


def _shortened(offsets: Array, start: int) -> Array:
    """Return offsets in the shard, in four bytes each wherever the chunk's do not need more."""
    if start > _LAST_SHORT_START:
        return offsets + start
    short = offsets.astype(np.uint32)
    short += np.uint32(start)
    return short
