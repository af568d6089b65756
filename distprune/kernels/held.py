"""Zeros, counted, held and written: on a GPU by one launch for all tensors of a kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch.autograd.graph import increment_version

from distprune.kernels.available import has_kernels, kernels
from distprune.kernels.table import Piece, Table, tables_of
from distprune.shards.device import count_true, fetched, is_zero
from distprune.shards.local_shard import bits_of, flat_chunks

_BLOCK = 1024
Masked = tuple[torch.Tensor, torch.Tensor]  # a tensor and its mask


@torch.no_grad()
def read_all_held(shards: Sequence[Masked], least: torch.Tensor, known: Tables) -> torch.Tensor:
    """Write into each mask (bool, same local shape) where its shard is +0.0; all are on one device. Local.

    Of a shard with fewer than ``least`` zeros (shards), int64, the mask stays as it is. Return counts, (shards, 3),
    int64: how many places of a mask changed, how many are True now, and whether there were too few. All on the device:
    the host does not wait.
    """
    (tables, others), num = known.of(shards), len(shards)
    memory = torch.zeros(4 * num, dtype=torch.int64, device=least.device)
    num_held, counts = memory[:num], memory[num:].view(num, 3)
    for table in tables:
        table.run(kernels("hold").count, num_held, FLOATS=False, MASKED=False, BLOCK=_BLOCK)
    for table in tables:
        table.run(kernels("hold").read_held, num_held, least, counts, BLOCK=_BLOCK)
    for i in others:
        counts[i] = _read(*shards[i], least[i])
    return counts


def _read(local: torch.Tensor, held: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Do so with one shard, in plain operations."""
    now = bits_of(local) == 0
    too_few = now.sum() < least
    now = torch.where(too_few, held, now)
    counts = torch.stack([(now != held).sum(), now.sum(), too_few.to(torch.int64)])
    held.copy_(now)
    return counts


def count_zeros(tensors: Sequence[torch.Tensor], within: Sequence[torch.Tensor] | None = None) -> list[int]:
    """Return how many elements of each are zero; ``within`` (bool, same shapes): where that is True.

    Local, one wait for a device, and one launch for all tensors of a kind.
    """
    counts, others = [torch.zeros((), dtype=torch.int64, device="cpu")] * len(tensors), [*range(len(tensors))]
    kinds = {(tensor.is_floating_point(), tensor.is_complex()) for tensor in tensors}
    if has_kernels(*[tensor.device for tensor in tensors]) and kinds in ({(True, False)}, {(False, False)}):
        memory = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
        tables, others = Tables().of([*zip(tensors, within or tensors, strict=True)])
        for table in tables:
            constants = {"FLOATS": kinds == {(True, False)}, "MASKED": within is not None, "BLOCK": _BLOCK}
            table.run(kernels("hold").count, memory, **constants)
        counts = [*memory.unbind()]
    for i in others:
        zeros = (is_zero(values) for _, values in flat_chunks(tensors[i]))
        if within is not None:
            zeros = (zero & mask for zero, (_, mask) in zip(zeros, flat_chunks(within[i]), strict=True))
        counts[i] = sum(map(count_true, zeros), start=counts[i])
    return [*map(int, fetched(counts))]


@torch.no_grad()
def zero_where_masked(shards: Sequence[Masked], where: bool, known: Tables, *, signs: int = 0) -> None:
    """Write +0.0 into each tensor where its mask (bool, same shape) is ``where``; all are on one device. Local.

    ``signs`` 1: and -0.0 over a +0.0 where it is not. -1: write +0.0 over every -0.0 instead, whatever the mask.
    """
    tables, others = known.of(shards)
    for table in tables:
        table.run(kernels("hold").mask, WHERE=where, SIGNS=signs, BLOCK=_BLOCK)
    for local, mask in (shards[i] for i in others):
        bits = bits_of(local.detach())
        if signs > 0:
            bits.masked_fill_(bits == 0, torch.iinfo(bits.dtype).min)
        if signs < 0 or where:
            bits.masked_fill_(bits == torch.iinfo(bits.dtype).min if signs < 0 else mask, 0)
        else:
            bits.mul_(mask)
    increment_version([local for local, _ in shards])  # no kernel does


@final
class Tables:
    """Of tensors, by device, each with its mask: made anew where one is elsewhere than the time before."""

    def __init__(self) -> None:
        self._known: dict[torch.device, tuple[object, list[Table], list[int]]] = {}

    def of(self, shards: Sequence[Masked]) -> tuple[list[Table], list[int]]:
        """Return tables, and which of ``shards``, all on one device, are in none, as kernels cannot take them."""
        device = shards[0][0].device
        places = [(local.data_ptr(), mask.data_ptr(), local.dtype, local.is_contiguous()) for local, mask in shards]
        before, tables, others = self._known.get(device, (None, [], []))
        if places != before:
            pieces, others = list[Piece](), []
            for i, (local, mask) in enumerate(shards):
                if has_kernels(device) and local.is_contiguous() and mask.is_contiguous():
                    pieces.append(Piece(bits_of(local.detach()).view(-1), i, out=mask.view(-1)))
                else:
                    others.append(i)
            tables = tables_of(pieces, _BLOCK)
            self._known[device] = places, tables, others
        return tables, others
