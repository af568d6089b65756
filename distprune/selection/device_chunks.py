"""Elements on an accelerator as chunks, so that what is launched follows the bytes, not the number of parameters.

Noun: a *piece* is what one chunk has of one entry: a range of it, alone in its chunk, or all of a small one, joined
with others. The pieces of all chunks are numbered. What is known of each is sent to the device once for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from distprune.selection.competition import Words
from distprune.selection.order import Order
from distprune.selection.scan import Entry, keys_of
from distprune.shards.device import batches, chunk_size, is_joined, sent

_MIXED_SHARE = 4  # a chunk of several competitions is a quarter: what it is compared with, each element has for itself


class Chunk:
    """Some elements of one order: of one entry those ``at`` local offsets, or those of several entries.

    ``first``: the number of its first piece. ``competition``: of all elements, or ``None``.
    """

    def __init__(self, chunks: Chunks, order: Order, entries: Sequence[Entry], at: slice, first: int) -> None:
        self._chunks, self.order, self.entries, self.at, self.first = chunks, order, entries, at, first
        self.numels = [e.geometry.local_numel for e in entries] if len(entries) > 1 else [at.stop - at.start]
        self.numel = sum(self.numels)
        competitions = {entry.competition for entry in entries}
        self.competition = competitions.pop() if len(competitions) == 1 else None

    @property
    def which(self) -> slice:
        """The numbers of its pieces."""
        return slice(self.first, self.first + len(self.entries))

    def keys(self) -> torch.Tensor:
        """Return the keys of all elements: new."""
        is_alone = len(self.entries) == 1
        return keys_of(self.order, [(e.scores, self.at) if is_alone else e.whole for e in self.entries])

    def pieces(self, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the piece of each element, or of those at ``offsets`` in the chunk, from 0 on: int32."""
        offsets = self._chunks.numbers[: self.numel] if offsets is None else offsets.to(torch.int32)
        ends = self._chunks.ends[self.which].to(torch.int32)
        return torch.bucketize(offsets, ends, right=True, out_int32=True)

    def positions(self, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the positions in their competitions of all elements, or of those at ``offsets``: int64."""
        if len(self.entries) == 1:
            entry, start, stop = self.entries[0], self.at.start, self.at.stop
            if offsets is None:
                return entry.geometry.flat_indices(start, stop, self._chunks.device) + entry.first_position
            return entry.geometry.flat_indices_at(offsets + start) + entry.first_position
        if all(entry.geometry.flat_start is not None for entry in self.entries):
            shifts = self._chunks.shifts[self.which].index_select(0, self.pieces(offsets))
            return shifts + (self._chunks.numbers[: self.numel] if offsets is None else offsets)
        everything = [
            entry.geometry.flat_indices(0, num, self._chunks.device) + entry.first_position
            for entry, num in zip(self.entries, self.numels, strict=True)
        ]
        positions = torch.cat(everything)
        return positions if offsets is None else positions.index_select(0, offsets)

    def sums(self, flags: torch.Tensor) -> torch.Tensor:
        """Return how many of ``flags`` (bool) are True in each piece: int64."""
        if len(self.entries) == 1:
            return flags.sum().view(1)
        passed = flags.cumsum(0, dtype=torch.int32).index_select(0, self._chunks.ends[self.which] - 1)
        passed[1:] -= passed[:-1].clone()
        return passed.to(torch.int64)


class Chunks:
    """All elements of ``entries``, which lie on one device. ``orders``: by competition."""

    def __init__(self, orders: Sequence[Order], entries: Sequence[Entry]) -> None:
        self.device = entries[0].scores.device if entries else torch.device("cpu")
        self.all: list[Chunk] = []
        self.num_pieces = 0
        size = chunk_size(self.device)
        joined: dict[Order, list[Entry]] = {}
        for entry in entries:
            numel = entry.geometry.local_numel
            if is_joined(numel, self.device):
                joined.setdefault(orders[entry.competition], []).append(entry)
                continue
            for start in range(0, numel, size):
                self._append(orders[entry.competition], [entry], slice(start, min(start + size, numel)))
        most = size if len(orders) == 1 else size // _MIXED_SHARE
        for order, small in joined.items():
            for which in batches(range(len(small)), [entry.geometry.local_numel for entry in small], most):
                self._append(order, [small[i] for i in which], slice(0, small[which[0]].geometry.local_numel))

    def _append(self, order: Order, entries: Sequence[Entry], at: slice) -> None:
        self.all.append(Chunk(self, order, entries, at, self.num_pieces))
        self.num_pieces += len(entries)

    @cached_property
    def competitions(self) -> Words:
        """The competition of each piece."""
        return np.array([entry.competition for chunk in self.all for entry in chunk.entries], dtype=np.int64)

    @cached_property
    def _sent(self) -> torch.Tensor:
        ends = [np.cumsum(chunk.numels) for chunk in self.all]
        starts = [end - chunk.numels for chunk, end in zip(self.all, ends, strict=True)]
        firsts = [e.first_position + (e.geometry.flat_start or 0) for chunk in self.all for e in chunk.entries]
        return self.send(np.stack([np.concatenate(ends), np.array(firsts) - np.concatenate(starts)]))

    @property
    def ends(self) -> torch.Tensor:
        """Where each piece ends in its chunk: int64."""
        return self._sent[0]

    @property
    def shifts(self) -> torch.Tensor:
        """What the positions of each piece that is not scattered are more than offsets in its chunk: int64."""
        return self._sent[1]

    @cached_property
    def numbers(self) -> torch.Tensor:
        """The numbers from 0 on, as many as a chunk has elements: int32."""
        return torch.arange(max(chunk.numel for chunk in self.all), dtype=torch.int32, device=self.device)

    def send(self, values: Words) -> torch.Tensor:
        """Return ``values`` on the device."""
        return sent(torch.from_numpy(values), self.device)
