"""One read of the local scores against a bracket of keys: the only pass over all the elements.

Nouns: a *bracket* is the inclusive range of keys in which the threshold is known to lie. Elements
above it stay, elements below it go; those inside are the *survivors*, still undecided.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from distprune.selection.eligible import Eligible
from distprune.selection.order import Order, OrderedBy
from distprune.shards import Geometry, chunk_size

__all__ = ["Counts", "Entry", "Scores", "Survivors", "scan"]

Array = npt.NDArray[Any]

_LAST_SHORT_START = (1 << 32) - (1 << 22)  # a chunk that starts here or before ends below 2**32
_SPAN = 1 << 20  # elements: below this a second thread costs more than it brings


class Scores(Protocol):
    """What a score offers of one local shard; see ``distprune.scores``."""

    @property
    def ordered_by(self) -> OrderedBy: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    def values(self, start: int, stop: int) -> torch.Tensor: ...
    def values_at(self, offsets: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Entry:
    """One parameter's local elements in a competition.

    ``eligible`` says which of the local elements compete; ``None``: all of them.
    """

    name: str
    scores: Scores
    geometry: Geometry
    owned: bool
    competition: int
    first_position: int  # the place, among the competition's positions, of flat index 0
    eligible: Eligible | None = None


@dataclass
class Counts:
    """Over owned, eligible elements, except that NaNs are counted wherever they are."""

    num_below: int = 0
    num_inside: int = 0
    num_above: int = 0
    num_nans: int = 0

    def add(self, other: Counts) -> None:
        self.num_below += other.num_below
        self.num_inside += other.num_inside
        self.num_above += other.num_above
        self.num_nans += other.num_nans


@dataclass(frozen=True)
class Survivors:
    """Undecided local elements: their offsets in the shard and their keys, in ascending offset order."""

    offsets: Array  # uint32, or int64 where that is too short
    keys: Array  # the order's key dtype


def scan(
    entry: Entry,
    order: Order,
    bracket: tuple[int, int],
    mask: torch.Tensor | None = None,
    offsets: tuple[int, int] | None = None,
) -> Iterator[tuple[Counts, Survivors]]:
    """Yield counts and survivors of the local elements, chunk by chunk in order.

    ``offsets``: only those from the first of the two to before the second; by default all of them.

    ``mask`` (bool, contiguous, local shape), where given, is written on the way: True above the
    bracket, False below it and where not eligible, True at survivors, to be settled later.
    """
    begin, end = offsets if offsets is not None else (0, entry.geometry.local_numel)
    flat_mask = mask.view(-1) if mask is not None else None
    step = chunk_size(entry.scores.device)
    scan_chunk = _scan_host if entry.scores.device.type == "cpu" else _scan_device

    def one(start: int) -> tuple[Counts, Survivors]:
        stop = min(start + step, end)
        values = entry.scores.values(start, stop)
        eligible = entry.eligible.values(start, stop) if entry.eligible is not None else None
        out = flat_mask[start:stop] if flat_mask is not None else None
        return scan_chunk(order, values, eligible, bracket, out, start)

    starts = range(begin, end, step)
    num_threads = min(torch.get_num_threads(), (end - begin) // _SPAN)
    if num_threads <= 1 or entry.scores.device.type != "cpu":
        yield from map(one, starts)
        return
    # numpy lets go of the interpreter lock; torch's own threads would sit idle meanwhile.
    with ThreadPoolExecutor(num_threads) as pool:
        ahead = 4 * num_threads  # chunks in flight, so that survivors waiting to be taken stay few
        for first in range(0, len(starts), ahead):
            yield from pool.map(one, starts[first : first + ahead])


def _scan_host(
    order: Order,
    values: torch.Tensor,
    eligible: torch.Tensor | None,
    bracket: tuple[int, int],
    out: torch.Tensor | None,
    start: int,
) -> tuple[Counts, Survivors]:
    keys: Array = order.keys(values).numpy()
    low, high = (keys.dtype.type(bound) for bound in bracket)
    above: Array = out.numpy() if out is not None else np.empty(len(keys), dtype=np.bool_)
    np.greater(keys, high, out=above)
    below = np.less(keys, low)
    inside = np.equal(below, above)  # neither: both False
    num_nans = _num_nans_host(order, keys)
    if eligible is not None:
        competes: Array = eligible.numpy()
        below &= competes
        inside &= competes
        above &= competes
    offsets = np.flatnonzero(inside)
    num_below = int(np.count_nonzero(below))
    num_above = len(keys) - num_below - len(offsets) if eligible is None else int(np.count_nonzero(above))
    counts = Counts(num_below, len(offsets), num_above, num_nans)
    survivors = Survivors(_shortened(offsets, start), keys[offsets])
    if len(offsets):
        above[offsets] = True
    return counts, survivors


def _shortened(offsets: Array, start: int) -> Array:
    """Return offsets in the shard, in four bytes each wherever the chunk's do not need more."""
    if start > _LAST_SHORT_START:
        return offsets + start
    short = offsets.astype(np.uint32)
    short += np.uint32(start)
    return short


def _num_nans_host(order: Order, keys: Array) -> int:
    if not order.value_dtype.is_floating_point:
        return 0
    num_nans = int(np.count_nonzero(keys > order.last)) if keys.max() > order.last else 0
    if order.first < 0 and keys.min() < order.first:
        num_nans += int(np.count_nonzero(keys < order.first))
    return num_nans


def _scan_device(
    order: Order,
    values: torch.Tensor,
    eligible: torch.Tensor | None,
    bracket: tuple[int, int],
    out: torch.Tensor | None,
    start: int,
) -> tuple[Counts, Survivors]:
    keys = order.keys(values)
    low, high = bracket
    above = out if out is not None else torch.empty(keys.shape, dtype=torch.bool, device=keys.device)
    torch.gt(keys, high, out=above)
    below = keys < low
    inside = below == above
    is_float = order.value_dtype.is_floating_point
    nans = ((keys > order.last) | (keys < order.first)).sum() if is_float else torch.zeros((), device=keys.device)
    if eligible is not None:
        below &= eligible
        inside &= eligible
        above &= eligible
    num_below, num_above, num_nans = (
        int(count) for count in torch.stack([below.sum(), above.sum(), nans.to(torch.int64)]).tolist()
    )
    offsets = inside.nonzero().view(-1)
    above |= inside
    counts = Counts(num_below, offsets.numel(), num_above, num_nans)
    return counts, Survivors(_shortened(offsets.cpu().numpy(), start), keys[offsets].cpu().numpy())
