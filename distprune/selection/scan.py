"""Reads of the local scores, a stretch of elements at a time: small entries joined, large ones in pieces.

Nouns: a *stretch* is elements that follow each other in a competition, of one entry or of several. A *bracket* is the
inclusive range of keys in which the threshold is known to lie. Elements above it stay, elements below it go; those
inside are the *survivors*, still undecided. The *place* of an element counts all elements of this rank before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from distprune.selection.competition import Keys, Words
from distprune.selection.order import Order
from distprune.shards.device import chunk_size
from distprune.shards.geometry import Geometry

Array = npt.NDArray[Any]
T = TypeVar("T")

_LAST_SHORT_START = (1 << 32) - (1 << 22)  # a stretch that starts here or before ends below 2**32
_NUM_CHUNKS = 4  # in a stretch: what Python does between takes longer than a larger cache
_SPAN = 1 << 20  # elements: below this a second thread costs more than it brings


class Keyed(Protocol):
    """Scores of one local shard as keys, 1-D: of a range of elements, or at local offsets; new, or in ``out``.

    ``joined_keys`` returns those of pieces of several small shards of its kind, one after the other. A range may have a
    step. On the host ``bits`` may give the weights' own bits, which make all of them by ``&``.
    """

    @property
    def device(self) -> torch.device: ...
    def keys(self, order: Order, at: slice | torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...
    def joined_keys(
        self, order: Order, pieces: Sequence[tuple[Any, slice]], out: torch.Tensor | None = None
    ) -> torch.Tensor: ...
    def bits(self, order: Order) -> tuple[Array, Any] | None: ...


@dataclass(frozen=True)
class Entry:
    """One parameter's local elements in a competition. ``drafts``: on a device its first read may write what stays."""

    name: str
    scores: Keyed
    geometry: Geometry
    owned: bool
    competition: int
    first_position: int  # the place, among the competition's positions, of flat index 0
    drafts: bool = True

    @property
    def whole(self) -> tuple[Keyed, slice]:
        """All its elements, as a piece."""
        return self.scores, slice(0, self.geometry.local_numel)

    def keys(self, order: Order, at: slice) -> torch.Tensor:
        """Return the keys of every n-th element."""
        if (bits := self.scores.bits(order)) is not None:
            return torch.from_numpy(bits[0][at] & bits[1])
        return self.scores.keys(order, at)


def keys_of(order: Order, pieces: Sequence[tuple[Keyed, slice]]) -> torch.Tensor:
    """Return the keys of ``pieces``, a range of one shard or several small ones of a device: new."""
    (scores, at), *others = pieces
    return scores.joined_keys(order, pieces) if others else scores.keys(order, at)


@dataclass(frozen=True)
class Stretch:
    """Elements of one competition, on the host: of some entries, in order. ``place``: of the first."""

    competition: int
    pieces: Sequence[tuple[Entry, slice]]
    place: int
    numel: int


@dataclass(frozen=True)
class Scanned:
    """What a scan of a stretch found: places, ascending, and keys of the survivors; how many others there are."""

    places: Array  # uint32, or int64 where that is too short
    keys: Keys  # the order's key dtype
    num_below: int
    num_above: int  # with NaNs
    num_nans: int

    @property
    def num_bytes(self) -> int:
        return int(self.places.nbytes + self.keys.nbytes)


def stretches(entries: Sequence[Entry], size: int) -> Iterator[Stretch]:
    """Yield all elements of ``entries``, ``size`` at a time, or those of one competition. Local."""
    pieces: list[tuple[Entry, slice]] = []
    place = numel = 0
    for entry in entries:
        if pieces and entry.competition != pieces[0][0].competition:
            yield Stretch(pieces[0][0].competition, pieces, place, numel)
            pieces, place, numel = [], place + numel, 0
        start, stop = 0, entry.geometry.local_numel
        while start < stop:
            end = min(stop, start + size - numel)
            pieces.append((entry, slice(start, end)))
            numel, start = numel + end - start, end
            if numel == size:
                yield Stretch(entry.competition, pieces, place, numel)
                pieces, place, numel = [], place + numel, 0
    if pieces:
        yield Stretch(pieces[0][0].competition, pieces, place, numel)


def stretch_size(device: torch.device) -> int:
    """Return how many elements are scanned at a time."""
    return chunk_size(device) * _NUM_CHUNKS


class KeyBits:
    """The keys of elements on the host, stretch by stretch, in the same memory."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._memory = torch.empty(0, dtype=order.key_dtype, device="cpu")

    def __call__(self, pieces: Sequence[tuple[Keyed, slice]]) -> Array:
        """Return the keys of ``pieces``."""
        found = [scores.bits(self._order) for scores, _ in pieces]
        numel = sum(at.stop - at.start for _, at in pieces)
        if len(self._memory) < numel:
            self._memory = torch.empty(numel, dtype=self._order.key_dtype, device="cpu")
        keys, start = self._memory[:numel], 0
        joined: Array = keys.numpy()
        if len(pieces) > 1 and not any(found):
            own = pieces[0][0].joined_keys(self._order, pieces, keys)
            if own.data_ptr() != keys.data_ptr():
                keys.copy_(own)
            return joined
        for of_weights, (scores, at) in zip(found, pieces, strict=True):
            stop = start + at.stop - at.start
            if of_weights is not None:
                np.bitwise_and(of_weights[0][at], of_weights[1], out=joined[start:stop])
            else:
                into = keys[start:stop]
                own = scores.keys(self._order, at, into)
                if own.data_ptr() != into.data_ptr():
                    joined[start:stop] = own.numpy()
            start = stop
        return joined


def key_chunks(entry: Entry, order: Order) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield local offsets and the keys there, chunk by chunk, on the device of the scores."""
    numel, step = entry.geometry.local_numel, chunk_size(entry.scores.device)
    for start in range(0, numel, step):
        at = slice(start, min(start + step, numel))
        yield at, entry.scores.keys(order, at)


def in_threads(function: Callable[[Stretch], T], all_stretches: Sequence[Stretch]) -> Iterator[T]:
    """Yield what ``function`` returns of each, in order; in several threads if torch has some and it is worth it."""
    num_threads = min(torch.get_num_threads(), sum(stretch.numel for stretch in all_stretches) // _SPAN)
    if num_threads <= 1:
        yield from map(function, all_stretches)
        return
    # numpy lets go of the interpreter lock; torch's own threads would sit idle meanwhile.
    with ThreadPoolExecutor(num_threads) as pool:
        ahead = 4 * num_threads  # in flight, so that survivors waiting to be taken stay few
        for first in range(0, len(all_stretches), ahead):
            yield from pool.map(function, all_stretches[first : first + ahead])


class Scan:
    """Scans stretches of one order, in the same memory for all of one thread."""

    def __init__(self, order: Order) -> None:
        self._order, self._own = order, threading.local()

    def __call__(self, stretch: Stretch, low: int, high: int) -> Scanned:
        """Return what is inside of the bracket from ``low`` to ``high``, and how many are not."""
        order, own, num = self._order, self._own, stretch.numel
        if not hasattr(own, "bits"):
            own.bits, own.size = KeyBits(order), 0
        keys = own.bits([(entry.scores, at) for entry, at in stretch.pieces])
        low_key, high_key = keys.dtype.type(low), keys.dtype.type(high)
        if own.size < num:  # fresh memory for each stretch would be as slow as the scan
            own.size, own.flags = num, np.empty((3, num), dtype=np.bool_)
        above, inside, kept = own.flags[:, :num]
        np.greater_equal(keys, low_key, out=kept)
        np.greater(keys, high_key, out=above)
        np.not_equal(kept, above, out=inside)
        offsets = np.flatnonzero(inside)
        num_kept, found = int(np.count_nonzero(kept)), keys[offsets]
        num_nans = int(np.count_nonzero(keys > order.last)) if keys.max() > order.last else 0
        places, num_inside = _shortened(offsets, stretch.place), len(offsets)
        return Scanned(places, found, num - num_kept, num_kept - num_inside, num_nans)


def _shortened(offsets: Array, start: int) -> Array:
    """Return places from ``start`` on, in four bytes each wherever the stretch's do not need more."""
    if start > _LAST_SHORT_START:
        return offsets + start
    short: Words = offsets.astype(np.uint32)
    short += np.uint32(start)
    return short
