"""What stays of entries on an accelerator, once their competitions are decided: one read, and no wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distprune.selection.device_chunks import Chunk, Chunks
from distprune.selection.order import Order
from distprune.selection.scan import Entry, Keyed

Parts = Callable[[slice], list[tuple[slice, int]]]  # of some elements of an entry; they begin at 0


@dataclass(frozen=True)
class Draft:
    """What stays of a chunk of one entry, written when it was read to count, as if all survivors did.

    ``flags``: a part of ``memory``, of the whole entry. ``keys`` and ``offsets`` are those of the survivors.
    """

    flags: torch.Tensor
    keys: torch.Tensor
    offsets: torch.Tensor
    num_gone: torch.Tensor
    memory: torch.Tensor
    scores: Keyed  # alive, so that its id is its own


Drafts = dict[tuple[int, int], Draft]  # by what the chunk is of


def draft_key(chunk: Chunk) -> tuple[int, int]:
    """Return what stands for a chunk of one entry: its scores, which are the same in each call, and where it begins."""
    return id(chunk.entries[0].scores), chunk.at.start


def decide_on_device(
    orders: Sequence[Order], entries: Sequence[tuple[Entry, Parts]], outs: Sequence[torch.Tensor], drafts: Drafts
) -> list[torch.Tensor]:
    """Write what stays of ``entries``, all on one device, into ``outs``. Local.

    ``orders``: by competition. ``Parts`` say the stretches of an entry's elements and the highest key that is pruned in
    each. ``drafts``: of chunks that need not be read again; they are used up. Return the counts of
    :func:`distprune.selection.decide.decide`.
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
        if len(chunk.entries) == 1 and (draft := drafts.pop(draft_key(chunk), None)) is not None:
            i = which_of[chunk][0]
            counts[i][0] += chunk.numel - _finished(draft, runs[chunk]).sum()
            counts[i][1] += draft.num_gone
            if chunk.at.stop == len(draft.memory):
                outs[i].copy_(draft.memory)
            continue
        keys, at = chunk.keys(), chunk.at
        which = which_of[chunk]
        own = [outs[i] for i in which]
        flags = own[0][at] if len(own) == 1 else torch.empty(chunk.numel, dtype=torch.bool, device=chunks.device)
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
        else:
            pruned, gone = chunk.sums(~flags), chunk.sums(gone)
            for i, of_entry in zip(which, torch.stack([pruned, gone, torch.zeros_like(gone)], 1), strict=True):
                counts[i] = of_entry
            torch._foreach_copy_(own, [*torch.split(flags, chunk.numels)])
    return counts


def _finished(draft: Draft, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the flags of ``draft``, in which those survivors that go are pruned too; at most two ``runs``."""
    (stop, key), *others = runs
    stays = draft.keys > key
    for _, key_beyond in others:
        stays = torch.where(draft.offsets < stop, stays, draft.keys > key_beyond)
    return draft.flags.index_copy_(0, draft.offsets, stays)


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
