"""Zeros that are held on a GPU: one launch of all tensors of a kind before a step, and one after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch.autograd.graph import increment_version

from distprune.kernels.available import has_kernels, kernels
from distprune.kernels.table import Piece, Table, tables_of
from distprune.shards.local_shard import bits_of

_BLOCK = 1024


@final
class HeldOnDevice:
    """Shards on one device, each with its mask (bool, same local shape)."""

    def __init__(self, shards: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._shards, self._device = shards, shards[0][0].device
        self._addresses: list[int] = []
        self._tables: list[Table] = []
        self._others: list[int] = []  # which kernels cannot take

    @torch.no_grad()
    def read(self, least: torch.Tensor) -> torch.Tensor:
        """Write into each mask where its shard is other than +0.0, and return counts, (shards, 3), int64. Local.

        Of a shard with fewer than ``least`` zeros (shards), int64, the mask stays as it is. The counts are how many
        places of a mask changed, how many are False now, and whether there were too few. All on the device: the host
        does not wait.
        """
        tables, num = self._up_to_date(), len(self._shards)
        memory = torch.zeros(4 * num, dtype=torch.int64, device=self._device)
        num_held, counts = memory[:num], memory[num:].view(num, 3)
        for kernel, arguments in (("count_held", ()), ("read_held", (least, counts))):
            for table in tables:
                table.run(getattr(kernels("hold"), kernel), num_held, *arguments)
        for i in self._others:
            counts[i] = _read(*self._shards[i], least[i])
        return counts

    @torch.no_grad()
    def write_signed_zeros(self) -> None:
        """Write +0.0 where a mask is False, and -0.0 over a +0.0 where it is True. Local."""
        for table in self._up_to_date():
            table.run(kernels("hold").mask, SIGNS=True)
        for local, kept in (self._shards[i] for i in self._others):
            bits = bits_of(local)
            bits.mul_(kept)
            bits.masked_fill_((bits == 0) & kept, torch.iinfo(bits.dtype).min)
        increment_version([local for local, _ in self._shards])  # no kernel does

    def _up_to_date(self) -> list[Table]:
        addresses = [local.data_ptr() for local, _ in self._shards]
        if addresses != self._addresses:  # memory can move under a tensor
            self._addresses = addresses
            self._tables, self._others = _tables_of(self._shards)
        return self._tables


def _read(local: torch.Tensor, kept: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Do so with one shard, in plain operations."""
    now = bits_of(local) != 0
    too_few = now.logical_not().sum() < least
    now = torch.where(too_few, kept, now)
    counts = torch.stack([(now != kept).sum(), now.logical_not().sum(), too_few.to(torch.int64)])
    kept.copy_(now)
    return counts


@torch.no_grad()
def zero_where_masked(shards: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write +0.0 into each tensor where its mask (bool, same shape) is False; all are on one device. Local."""
    tables, others = _tables_of(shards)
    for table in tables:
        table.run(kernels("hold").mask, SIGNS=False)
    for local, mask in (shards[i] for i in others):
        bits_of(local.detach()).mul_(mask)
    increment_version([local for local, _ in shards])


def _tables_of(shards: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[list[Table], list[int]]:
    """Return tables, and which of ``shards`` are in none."""
    pieces, others = [], []
    for i, (local, mask) in enumerate(shards):
        if has_kernels(local.device) and local.is_contiguous() and mask.is_contiguous():
            pieces.append(Piece(bits_of(local.detach()).view(-1), i, out=mask.view(-1)))
        else:
            others.append(i)
    tables = tables_of(pieces, _BLOCK)
    for table in tables:
        table.constants = {"WORD": table.constants["DTYPE"], "ALIGNED": table.constants["ALIGNED"], "BLOCK": _BLOCK}
    return tables, others
