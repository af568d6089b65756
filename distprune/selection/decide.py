"""What stays of one entry, once its competition is decided.

With k the last key that is pruned and p the last position of an element with that key that is:

    stays = (key > k) | ((key == k) & (position > p))

Positions ascend with local offsets. So the ties that are pruned are those before one offset, the ``edge``, and one
comparison decides each side of it: ``key > k`` before, ``key > k - 1`` from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distprune.selection.competition import Standings
from distprune.selection.device_decide import Drafts, decide_on_device
from distprune.selection.order import Order
from distprune.selection.scan import Entry, KeyBits, Keyed
from distprune.shards.device import batches, by_accelerator, chunk_size, is_small
from distprune.shards.geometry import Geometry

Array = npt.NDArray[Any]


def decide(
    standings: Standings, entries: Sequence[Entry], outs: Sequence[torch.Tensor], drafts: Drafts
) -> list[torch.Tensor]:
    """Write what stays of ``entries`` into ``outs`` (bool, 1-D). Local: one read of the scores, but of ``drafts``.

    Return of each how many are pruned, how many of these were gone before, and 0 NaNs, which were looked for: int64, on
    the device of the scores.
    """
    bounds = [_Bound(standings, each.competition, each.geometry, each.first_position) for each in entries]
    kinds: list[object] = [
        bound.order if is_small(entry.geometry.local_numel, entry.scores.device) else None
        for entry, bound in zip(entries, bounds, strict=True)
    ]
    orders, on_devices = [each.order for each in standings.competitions], dict[int, torch.Tensor]()
    for which in by_accelerator(entry.scores.device for entry in entries).values():
        parts = [(entries[i], bounds[i].parts) for i in which]
        on_devices.update(zip(which, decide_on_device(orders, parts, [outs[i] for i in which], drafts), strict=True))

    def decide_alone(i: int) -> torch.Tensor:
        return on_devices[i] if i in on_devices else _decide_large(entries[i], bounds[i], outs[i])

    def keep(keys: Array, which: Sequence[int]) -> Array:
        stays, start = np.empty(len(keys), dtype=np.bool_), 0
        for i in which:
            end = start + entries[i].geometry.local_numel
            for part, key in bounds[i].parts(slice(0, end - start)):
                np.greater(keys[start:end][part], keys.dtype.type(key), out=stays[start:end][part])
            start = end
        return stays

    everything = [entry.whole for entry in entries]
    return decide_together(everything, kinds, lambda i: bounds[i].order, keep, outs, decide_alone)


def stays_of(
    standings: Standings, keys: torch.Tensor, competition: int, geometry: Geometry, first_position: int
) -> torch.Tensor:
    """Return which of some elements stay, bool, given all of their ``keys``, and what an entry says of them. Local."""
    stays = torch.empty(len(keys), dtype=torch.bool, device=keys.device)
    for part, key in _Bound(standings, competition, geometry, first_position).parts(slice(0, len(keys))):
        torch.gt(keys[part], key, out=stays[part])
    return stays


def decide_together(
    pieces: Sequence[tuple[Keyed, slice]],
    kinds: Sequence[object],
    order_of: Callable[[int], Order],
    keep: Callable[[Array, Sequence[int]], Array],
    outs: Sequence[torch.Tensor],
    decide_alone: Callable[[int], torch.Tensor],
) -> list[torch.Tensor]:
    """Write what stays of ``pieces``, small ones of one kind together; return the counts of :func:`decide`. Local.

    ``kinds``: of each piece, ``None`` if it is decided by ``decide_alone``; those of one kind have one order.
    ``keep(keys, which)`` returns which of the joined keys of pieces ``which`` stay, bool.
    """
    numbers = np.zeros((len(pieces), 3), dtype=np.int64)
    of_kind: dict[object, list[int]] = {}
    for i, kind in enumerate(kinds):
        if kind is not None:
            of_kind.setdefault(kind, []).append(i)
    for all_of_kind in of_kind.values():
        order = order_of(all_of_kind[0])
        keys_at = KeyBits(order)
        for which in batches(all_of_kind, [pieces[i][1].stop for i in all_of_kind]):
            keys = keys_at([pieces[i] for i in which])
            stays, ends = keep(keys, which), np.cumsum([pieces[i][1].stop for i in which])
            firsts = ends - [pieces[i][1].stop for i in which]
            numbers[which, 0] = np.add.reduceat(~stays, firsts, dtype=np.int64)
            if keys.min() < order.first:
                numbers[which, 1] = np.add.reduceat(keys < order.first, firsts, dtype=np.int64)
            if keys.max() > order.last:
                numbers[which, 2] = np.add.reduceat(keys > order.last, firsts, dtype=np.int64)
            for i, stay in zip(which, np.split(stays, ends[:-1]), strict=True):
                outs[i].numpy()[:] = stay
    counts = [*torch.from_numpy(numbers)]
    for i, kind in enumerate(kinds):
        if kind is None:
            counts[i] = decide_alone(i)
    return counts


class _Bound:
    """What is pruned of an entry: keys of ``key`` at most before the offset ``edge``, and below it from there on."""

    def __init__(self, standings: Standings, of: int, geometry: Geometry, first_position: int) -> None:
        self.order, self.key = standings.competitions[of].order, int(standings.keys.low[of])
        last = int(standings.positions.low[of])
        if standings.only_gone[of]:
            self.key, last = self.order.gone, int(standings.num_positions[of])
        self.edge = geometry.num_before(last + 1 - first_position)

    def parts(self, at: slice) -> list[tuple[slice, int]]:
        """Return the stretches of the elements ``at``, which begin at 0, and the highest key that is pruned there."""
        num = at.stop - at.start
        middle = min(max(self.edge - at.start, 0), num)
        parts = [(slice(0, middle), self.key), (slice(middle, num), self.key - 1)]
        return [(part, key) for part, key in parts if part.start < part.stop]


def _decide_large(entry: Entry, bound: _Bound, out: torch.Tensor) -> torch.Tensor:
    numel, size, keys_at = entry.geometry.local_numel, chunk_size(entry.scores.device), KeyBits(bound.order)
    flags, num_kept, num_gone = out.numpy(), 0, 0
    for start in range(0, numel, size):
        at = slice(start, min(start + size, numel))
        keys, stays = keys_at([(entry.scores, at)]), flags[at]
        for part, key in bound.parts(at):
            np.greater(keys[part], keys.dtype.type(key), out=stays[part])
        num_kept += int(np.count_nonzero(stays))
        if keys.min() < bound.order.first:
            num_gone += int(np.count_nonzero(keys < bound.order.first))
    return torch.tensor([numel - num_kept, num_gone, 0], dtype=torch.int64, device="cpu")
