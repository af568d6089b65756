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
Masked = tuple[torch.Tensor, torch.Tensor]  # a tensor and its mask


@final
class HeldOnDevice:
    """Shards on one device, each with a mask (bool, same local shape) that is True where a weight is held."""

    def __init__(self, shards: Sequence[Masked]) -> None:
        self._shards, self._device, self._tables = shards, shards[0][0].device, Tables()

    @torch.no_grad()
    def read(self, least: torch.Tensor) -> torch.Tensor:
        """Write into each mask where its shard is +0.0, and return counts, (shards, 3), int64. Local.

        Of a shard with fewer than ``least`` zeros (shards), int64, the mask stays as it is. The counts are how many
        places of a mask changed, how many are True now, and whether there were too few. All on the device: the host
        does not wait.
        """
        (tables, others), num = self._tables.of(self._shards), len(self._shards)
        memory = torch.zeros(4 * num, dtype=torch.int64, device=self._device)
        num_held, counts = memory[:num], memory[num:].view(num, 3)
        for kernel, arguments in (("count_held", ()), ("read_held", (least, counts))):
            for table in tables:
                table.run(getattr(kernels("hold"), kernel), num_held, *arguments)
        for i in others:
            counts[i] = _read(*self._shards[i], least[i])
        return counts

    def write_signed_zeros(self) -> None:
        """Write +0.0 where a mask is True, and -0.0 over a +0.0 where it is False. Local."""
        zero_where_masked(self._shards, True, self._tables, signs=True)


def _read(local: torch.Tensor, held: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Do so with one shard, in plain operations."""
    now = bits_of(local) == 0
    too_few = now.sum() < least
    now = torch.where(too_few, held, now)
    counts = torch.stack([(now != held).sum(), now.sum(), too_few.to(torch.int64)])
    held.copy_(now)
    return counts


@torch.no_grad()
def zero_where_masked(shards: Sequence[Masked], where: bool, known: Tables, *, signs: bool = False) -> None:
    """Write +0.0 into each tensor where its mask (bool, same shape) is ``where``; all are on one device. Local.

    ``signs``: and -0.0 over a +0.0 where it is not.
    """
    tables, others = known.of(shards)
    for table in tables:
        table.run(kernels("hold").mask, WHERE=where, SIGNS=signs)
    for local, mask in (shards[i] for i in others):
        bits = bits_of(local.detach())
        if signs:
            bits.masked_fill_(bits == 0, torch.iinfo(bits.dtype).min)
        bits.masked_fill_(mask, 0) if where else bits.mul_(mask)
    increment_version([local for local, _ in shards])  # no kernel does


@final
class Tables:
    """Of tensors on one device, each with its mask: made anew where one is elsewhere than the time before."""

    def __init__(self) -> None:
        self._places: object = None
        self._tables: list[Table] = []
        self._others: list[int] = []

    def of(self, shards: Sequence[Masked]) -> tuple[list[Table], list[int]]:
        """Return tables, and which of ``shards`` are in none, as kernels cannot take them."""
        places = [(local.data_ptr(), mask.data_ptr(), local.is_contiguous()) for local, mask in shards]
        if places != self._places:
            self._places, self._others, pieces = places, [], []
            for i, (local, mask) in enumerate(shards):
                if has_kernels(local.device) and local.is_contiguous() and mask.is_contiguous():
                    pieces.append(Piece(bits_of(local.detach()).view(-1), i, out=mask.view(-1)))
                else:
                    self._others.append(i)
            self._tables = tables_of(pieces, _BLOCK)
            for made in self._tables:
                made.constants = {
                    "WORD": made.constants["DTYPE"],
                    "ALIGNED": made.constants["ALIGNED"],
                    "BLOCK": _BLOCK,
                }
        return self._tables, self._others
