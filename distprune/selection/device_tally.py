"""What a rank's elements on an accelerator add to the counts: it waits once a round, for all that was counted.

The elements in a bracket are the *survivors*. Where few are expected, the first read of a chunk sets them aside on the
device, in a buffer of bounded size, and later rounds read that. It also writes what stays but for them, which becomes
the mask: to decide, the chunk is not read again. If they turn out to be too many, which the host hears with the counts,
the round is counted again from all elements, as are those after it until few are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from distprune.selection.competition import Flags, Standings, Words
from distprune.selection.counts import NO_END, BinCounts
from distprune.selection.device_chunks import Chunk, Chunks
from distprune.selection.device_decide import Draft, Drafts, draft_key
from distprune.selection.order import Order
from distprune.selection.scan import Entry
from distprune.shards.device import fetched

_KEPT_BYTES = 24 << 20  # survivors set aside on one device
_SLOTS_SHARE = 32  # of a chunk's elements: so many survivors it may have; of the joined ones of several competitions
_MIXED_SLOTS_SHARE = 4  # a quarter, since brackets of few elements are wide
_LEAST_SLOTS = 1 << 8
_BRACKETED = 50  # of the elements of a competition one is in its bracket, or fewer

_Value = int | torch.Tensor  # of all elements, or of each


@dataclass(frozen=True)
class _Survivors:
    """Some survivors. ``competition``: of all, or ``None``."""

    competition: int | None
    keys: torch.Tensor
    positions: torch.Tensor
    pieces: Callable[[], torch.Tensor]


class _Aside:
    """Survivors of one order: keys, positions, and pieces if there are several competitions. The others are padding.

    ``offsets``: where they are in their chunks. ``nums``: how many of each chunk there are, and whether there may be
    more, since all its slots were taken.
    """

    def __init__(self, order: Order, capacity: int, chunks: Chunks, competition: int | None) -> None:
        self.order, self.competition, self._capacity, self._chunks = order, competition, capacity, chunks
        device, size = chunks.device, capacity + 1  # the last place takes what does not fit
        self.keys = torch.full((size,), order.gone, dtype=order.key_dtype, device=device)
        self._positions, self._offsets = torch.zeros((2, size), dtype=torch.int64, device=device)
        self._pieces = torch.zeros(0 if competition is not None else size, dtype=torch.int32, device=device)
        self.nums: list[torch.Tensor] = []
        self._num = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, chunk: Chunk, keys: torch.Tensor, inside: torch.Tensor, slots: int) -> None:
        found = torch.nonzero_static(inside, size=slots, fill_value=-1).view(-1)
        offsets = found.clamp(min=0)
        places = (self._chunks.numbers[:slots].to(torch.int64) + self._num).clamp_(max=self._capacity)
        own = keys.index_select(0, offsets).masked_fill_(found < 0, self.order.gone)
        self.keys.index_copy_(0, places, own)
        self._offsets.index_copy_(0, places, offsets)
        self._positions.index_copy_(0, places, chunk.positions(offsets))
        if self.competition is None:
            self._pieces.index_copy_(0, places, chunk.pieces(offsets) + chunk.first)
        self.nums.append(torch.stack([(found >= 0).sum(), found[-1] >= 0]))
        self._num += self.nums[-1][0]

    def parts(self) -> Iterator[_Survivors]:
        """Yield them, as many as a chunk has at a time."""
        size = len(self._chunks.numbers)
        for start in range(0, len(self.keys), size):
            at = slice(start, start + size)
            pieces = partial(self._pieces.__getitem__, at)
            yield _Survivors(self.competition, self.keys[at], self._positions[at], pieces)

    def cut(self, nums: Words) -> Iterator[tuple[torch.Tensor, torch.Tensor]] | None:
        """Let go of the padding. Return, if all did fit, the keys and offsets of each chunk."""
        ends = np.cumsum(nums[:, 0]).tolist()
        if ends[-1] > self._capacity or nums[:, 1].any():
            return None
        own = (self.keys, self._positions, self._offsets, self._pieces)
        self.keys, self._positions, self._offsets, self._pieces = (each[: ends[-1]].clone() for each in own)
        keys, offsets = (each.tensor_split(ends[:-1]) for each in (self.keys, self._offsets))
        return zip(keys, offsets, strict=True)


class DeviceTally:
    """Counts of entries on one accelerator."""

    def __init__(self, standings: Standings, entries: Sequence[Entry]) -> None:
        self._standings = standings
        self._chunks = Chunks([each.order for each in standings.competitions], entries)
        self._unread = self._chunks.all
        self._aside: list[_Aside] = []
        self.drafts: Drafts = {}
        self._is_mixed = len(standings.competitions) > 1

    def count_keys(self, counts: BinCounts) -> None:
        """Add the keys inside the ranges, and, on the first look, what is outside."""
        standings, of = self._standings, self._chunks.competitions
        if self._aside and (standings.needs_scan & ~standings.only_gone)[of].any():
            self._aside, self._unread = [], self._chunks.all  # a bracket missed
            self.drafts.clear()
        if not self._count_keys(counts, sets_aside=self._are_few(counts)):
            self._count_keys(counts, sets_aside=False)

    def _count_keys(self, counts: BinCounts, *, sets_aside: bool) -> bool:
        """Do so; return whether all survivors did fit. If not, nothing is added."""
        standings = self._standings
        needs_scan, keys = standings.needs_scan, standings.keys
        sums = _DeviceSums(counts, self._chunks, (keys.low, keys.high))
        new: dict[Order, _Aside] = {}
        read: dict[Order, list[tuple[Chunk, tuple[torch.Tensor, torch.Tensor] | None]]] = {}  # what is kept, and gone
        memory: dict[int, torch.Tensor] = {}  # for what stays, by entry
        for chunk in self._counted(counts):
            order, values = chunk.order, chunk.keys()
            (low, high), row, width = sums.of(chunk)
            kept = torch.ge(values, low, out=_flags(chunk, memory, self._chunks.device) if sets_aside else None)
            if needs_scan[self._chunks.competitions[chunk.which]].any():
                sums.add_kept(chunk, kept)
                if order.value_dtype.is_floating_point:
                    sums.num_nans += values.max() > order.last
            above = values > high
            inside = torch.ne(kept, above, out=above)
            if sets_aside:
                if order not in new:
                    new[order] = self._new_aside(order)
                new[order].add(chunk, values, inside, self._slots(chunk))
                of_draft = (kept, (values < order.first).sum()) if id(chunk.entries[0]) in memory else None
                read.setdefault(order, []).append((chunk, of_draft))
            else:
                sums.add(values, inside, low, row, width)
            del values, kept, above, inside  # before the next ones are made
        for part in (part for aside in [*self._aside, *new.values()] for part in aside.parts()):
            (low, high), row, width = sums.of(part)
            sums.add(part.keys, (part.keys >= low) & (part.keys <= high), low, row, width)
        nums = sums.fetch([each for aside in new.values() for each in aside.nums])
        parts = np.split(nums, np.cumsum([len(of_order) for of_order in read.values()])[:-1]) if read else []
        found = [aside.cut(each) for aside, each in zip(new.values(), parts, strict=True)]
        if any(each is None for each in found):
            return False
        sums.take(needs_scan)
        self._aside += new.values()
        for of_order, survivors in zip(read.values(), found, strict=True):
            for (chunk, of_draft), (own_keys, offsets) in zip(of_order, survivors or (), strict=True):
                if of_draft is not None:
                    (kept, gone), (entry,) = of_draft, chunk.entries
                    draft = Draft(kept, own_keys, offsets, gone, memory[id(entry)], entry.scores)
                    self.drafts[draft_key(chunk)] = draft
        are_read = {chunk for of_order in read.values() for chunk, *_ in of_order}
        self._unread = [chunk for chunk in self._unread if chunk not in are_read]
        return True

    def count_positions(self, counts: BinCounts) -> None:
        """Add the positions inside the ranges, of elements that tie with the k-th key."""
        positions = self._standings.positions
        sums = _DeviceSums(counts, self._chunks, (self._standings.keys.low, positions.low, positions.high))

        def count(source: Chunk | _Survivors, keys: torch.Tensor, where: torch.Tensor) -> None:
            (key, low, high), row, width = sums.of(source)
            counted = keys == key
            counted &= where >= low
            counted &= where <= high
            sums.add(where, counted, low, row, width)

        for chunk in self._counted(counts):
            count(chunk, chunk.keys(), chunk.positions())
        for part in (part for aside in self._aside for part in aside.parts()):
            count(part, part.keys, part.positions)
        sums.fetch()
        sums.take(np.zeros_like(self._standings.needs_scan))

    def _counted(self, counts: BinCounts) -> Iterator[Chunk]:
        """Yield the chunks that are unread, of competitions that are counted."""
        of = self._chunks.competitions
        return (chunk for chunk in self._unread if (counts.rows[of[chunk.which]] >= 0).any())

    def _are_few(self, counts: BinCounts) -> bool:
        """Return whether the survivors of what is unread may well fit."""
        standings, left = self._standings, np.flatnonzero(counts.rows >= 0)
        everything = standings.all_keys.at(left)
        has_bracket = (standings.keys.low[left] > everything.low) | (standings.keys.high[left] < everything.high)
        bracketed = np.where(has_bracket, standings.num_positions[left] // _BRACKETED, standings.num_positions[left])
        num = int(np.where(standings.needs_scan[left], bracketed, standings.num_within[left]).sum())
        num_here = sum(chunk.numel for chunk in self._unread)
        slots = sum(map(self._slots, self._unread))
        return num * num_here < slots * int(standings.num_positions[left].sum())

    def _slots(self, chunk: Chunk) -> int:
        share = _SLOTS_SHARE if chunk.competition is not None else _MIXED_SLOTS_SHARE
        return max(chunk.numel // share, min(chunk.numel, _LEAST_SLOTS))

    def _new_aside(self, order: Order) -> _Aside:
        orders = {chunk.order for chunk in self._unread}
        most = _KEPT_BYTES // len(orders) // (order.key_dtype.itemsize + 12)
        slots = sum(self._slots(chunk) for chunk in self._unread if chunk.order == order)
        return _Aside(order, min(slots, most), self._chunks, None if self._is_mixed else 0)


class _DeviceSums:
    """What is counted on the device in a round, one row a competition, and one more for those that are not counted.

    ``columns``: by competition, what elements are compared with; the last two are the bounds that the bins divide.
    """

    def __init__(self, counts: BinCounts, chunks: Chunks, columns: Sequence[Words]) -> None:
        self._counts, self._chunks = counts, chunks
        (num_rows, self._num_columns), device = counts.bins.shape, chunks.device
        rows = np.where(counts.rows < 0, num_rows, counts.rows)
        widths = np.append(counts.within.widths(self._num_columns).astype(np.int64), np.iinfo(np.int64).max)[rows]
        self._values = np.stack([*columns, rows, widths])
        # int32 is enough but for more elements than it has numbers.
        is_short = counts.wanted == "counts" and sum(chunk.numel for chunk in chunks.all) < 1 << 31
        dtype = torch.int32 if is_short else torch.int64
        self._bins = torch.full(((num_rows + 1) * self._num_columns,), counts.nothing, dtype=dtype, device=device)
        self._kept = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._num_read = np.zeros(num_rows + 1, dtype=np.int64)
        self.num_nans = torch.zeros((), dtype=torch.int64, device=device)
        self._table: torch.Tensor | None = None

    @property
    def _of_pieces(self) -> torch.Tensor:
        """What is known of each piece's competition, (columns, pieces)."""
        if self._table is None:
            self._table = self._chunks.send(self._values[:, self._chunks.competitions])
        return self._table

    def of(self, source: Chunk | _Survivors) -> tuple[Sequence[Any], _Value, _Value]:
        """Return what the elements are compared with, their rows, and the widths of their bins."""
        if source.competition is not None:
            *bounds, row, width = self._values[:, source.competition].tolist()
        else:
            table, pieces = self._of_pieces, source.pieces()
            table = table[:, source.which] if isinstance(source, Chunk) else table
            *bounds, row, width = (of_pieces.index_select(0, pieces) for of_pieces in table)
        return bounds, row, width

    def add_kept(self, chunk: Chunk, kept: torch.Tensor) -> None:
        """Add which elements are not below their range."""
        rows = self._values[-2, self._chunks.competitions[chunk.which]]
        np.add.at(self._num_read, rows, chunk.numels)
        if chunk.competition is not None:
            self._kept[int(rows[0])] += kept.sum()
        else:
            self._kept.index_add_(0, self._of_pieces[-2, chunk.which], chunk.sums(kept))

    def add(self, values: torch.Tensor, counted: torch.Tensor, low: _Value, row: _Value, width: _Value) -> None:
        """Add those of ``values`` that are ``counted``."""
        wanted, num = self._counts.wanted, self._num_columns
        own = self._bins[row * num : (row + 1) * num] if isinstance(row, int) else self._bins
        if wanted == "counts":
            index = _bins_of(values, low, width, self._counts.within.largest)
            if not isinstance(row, int):
                index += row * num
            # What is not counted adds 0, spread over the bins: many additions to one place wait for each other.
            index = torch.where(counted, index, self._chunks.numbers[: len(index)] % len(own))
            own.index_add_(0, index, counted.to(own.dtype))
            return
        wide = values.to(torch.int64)
        columns = [(wide, 0)] if wanted == "sum" else [(-wide, NO_END), (wide, NO_END)]
        for column, (each, nothing) in enumerate(columns):
            each = each.masked_fill(~counted, nothing)
            if isinstance(row, int):
                of_column = own[column]
                of_column.copy_(of_column + each.sum() if wanted == "sum" else torch.maximum(of_column, each.max()))
            elif wanted == "sum":
                own.index_add_(0, row, each)
            else:
                own.view(-1, 2)[:, column].scatter_reduce_(0, row, each, "amax")

    def fetch(self, nums: Sequence[torch.Tensor] = ()) -> Words:
        """Wait for the device; return ``nums`` (2,), one below the other."""
        others = torch.stack([*nums]) if nums else self._kept.new_empty((0, 2))
        told = fetched([self._bins.to(torch.int64), self._kept, self.num_nans, others])
        self._bins, self._kept, self.num_nans, others = told
        found: Words = others.numpy()
        return found

    def take(self, needs_scan: Flags) -> None:
        """Add what was fetched to the counts; what is beyond only of competitions that need it."""
        counts, bins = self._counts, self._bins.view(-1, self._num_columns).numpy()
        counts.take(bins[:-1])
        rows = counts.rows[(counts.rows >= 0) & needs_scan]
        kept: Words = self._kept.numpy()
        counts.beyond[rows, 0] += (self._num_read - kept)[rows]
        counts.beyond[rows, 1] += (kept - bins.sum(1))[rows]
        counts.num_nans += int(self.num_nans)


def _flags(chunk: Chunk, memory: dict[int, torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """Return where to write what stays of ``chunk``: it becomes a part of the mask. ``None``: not of one."""
    entry = chunk.entries[0]
    if len(chunk.entries) > 1 or not entry.drafts:
        return None
    if id(entry) not in memory:
        memory[id(entry)] = torch.empty(entry.geometry.local_numel, dtype=torch.bool, device=device)
    return memory[id(entry)][chunk.at]


def _bins_of(values: torch.Tensor, low: _Value, width: _Value, largest: int) -> torch.Tensor:
    """Return the bin of each of ``values``, of ranges that begin at ``low``; of those outside, anything."""
    is_short = isinstance(low, int) and values.itemsize < 8 and largest <= 1 << 31
    above_low = torch.sub(values.to(torch.int32 if is_short else torch.int64), low)
    if largest <= 1 << 63:
        return above_low if isinstance(width, int) and width == 1 else above_low.div_(width, rounding_mode="trunc")
    # It wraps, and is read as unsigned.
    bins = ((above_low >> 1) & torch.iinfo(torch.int64).max).div_(width, rounding_mode="trunc").mul_(2)
    bins += (above_low - bins * width) >= width
    return bins
