"""What stays of entries on an accelerator, once their competitions are decided: one read, and no wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from distprune.selection.device_chunks import Chunk, Chunks
from distprune.selection.order import Order
from distprune.selection.put import Put, put_all
from distprune.selection.scan import Entry

Parts = Callable[[slice], list[tuple[slice, int]]]  # of some elements of an entry; they begin at 0


def decide_on_device(
    orders: Sequence[Order], entries: Sequence[tuple[Entry, Parts]], puts: Sequence[Put]
) -> list[torch.Tensor]:
    """Put what stays of ``entries``, all on one device. Local.

    ``orders``: by competition. ``Parts`` say the stretches of an entry's elements and the highest key that is pruned in
    each. Return the counts of :func:`distprune.selection.decide.decide`.
    """
    chunks = Chunks(orders, [entry for entry, _ in entries])
    number = {id(entry): i for i, (entry, _) in enumerate(entries)}
    counts = [*torch.zeros((len(entries), 3), dtype=torch.int64, device=chunks.device)]
    which_of = {chunk: [number[id(entry)] for entry in chunk.entries] for chunk in chunks.all}
    runs = {chunk: [*_runs(chunk, [entries[i][1] for i in which])] for chunk, which in which_of.items()}
    many = [run for of_chunk in runs.values() if len(of_chunk) > 2 for run in of_chunk]
    table = chunks.send(np.array(many, dtype=np.int64).reshape(-1, 2).T.copy()) if many else None
    first = 0
    for chunk in chunks.all:
        keys, at = chunk.keys(), chunk.at
        which = which_of[chunk]
        own = [puts[i] for i in which]
        if len(own) == 1:
            flags = own[0].flags(at, chunks.device)
        else:
            flags = torch.empty(chunk.numel, dtype=torch.bool, device=chunks.device)
        if len(runs[chunk]) > 2:
            assert table is not None
            ends, highest = table[:, first : first + len(runs[chunk])]
            first += len(runs[chunk])
            run = torch.bucketize(chunks.numbers[: chunk.numel], ends.to(torch.int32), right=True, out_int32=True)
            torch.gt(keys, highest.to(keys.dtype).index_select(0, run), out=flags)
        else:
            start = 0
            for stop, key in runs[chunk]:
                torch.gt(keys[start:stop], key, out=flags[start:stop])
                start = stop
        gone = keys < chunk.order.first
        if len(own) == 1:
            counts[which[0]][0] += chunk.numel - flags.sum()
            counts[which[0]][1] += gone.sum()
            own[0].stays(at, flags)
        else:
            pruned, gone = chunk.sums(~flags), chunk.sums(gone)
            for i, of_entry in zip(which, torch.stack([pruned, gone, torch.zeros_like(gone)], 1), strict=True):
                counts[i] = of_entry
            put_all(own, flags, chunk.numels)
    return counts


def _runs(chunk: Chunk, parts: Sequence[Parts]) -> Iterator[tuple[int, int]]:
    """Yield where each run of elements ends in ``chunk`` whose highest pruned key is one, and that key."""
    start, last = 0, None
    for of_entry, num in zip(parts, chunk.numels, strict=True):
        for part, key in of_entry(chunk.at if len(parts) == 1 else slice(0, num)):
            if last is not None and last[1] != key:
                yield last
            last = start + part.stop, key
        start += num
    if last is not None:
        yield last
