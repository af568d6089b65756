"""Zeros that are held on a GPU: one launch of all tensors of a kind before a step, and one after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from distprune.kernels.available import kernels
from distprune.kernels.table import Piece, Table, tables_of
from distprune.shards.local_shard import bits_of

_BLOCK = 1024


@final
class HeldOnDevice:
    """Shards on one device, each with its mask (bool, same local shape), both contiguous."""

    def __init__(self, shards: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._shards, self._device = shards, shards[0][0].device
        self._addresses: list[int] = []
        self._tables: list[Table] = []

    def read(self, least: torch.Tensor) -> torch.Tensor:
        """Do with each shard as :func:`distprune.masks.in_place.read_kept`, and return its counts, (shards, 3), int64.

        ``least``: of each shard, on the device, as what is returned: the host does not wait.
        """
        hold, tables = kernels("hold"), self._up_to_date()
        counts = torch.zeros((len(self._shards), 4), dtype=torch.int64, device=self._device)
        num_held, totals = counts.view(-1)[: len(self._shards)], counts.view(-1)[len(self._shards) :]
        for table in tables:
            table.run(hold.count_held, num_held)
        for table in tables:
            table.run(hold.read_held, num_held, least, totals)
        return totals.view(-1, 3)

    def write_signed_zeros(self) -> None:
        """Do with each shard as :func:`distprune.masks.in_place.write_signed_zeros`. Local."""
        for table in self._up_to_date():
            table.run(kernels("hold").mask, SIGNS=True)

    def _up_to_date(self) -> list[Table]:
        addresses = [local.data_ptr() for local, _ in self._shards]
        if addresses != self._addresses:  # memory can move under a tensor
            self._addresses, self._tables = addresses, _tables_of(*zip(*self._shards, strict=True))
        return self._tables


def zero_where_masked(locals_: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> None:
    """Write +0.0 into each of ``locals_`` where its mask (bool, same local shape) is False. Contiguous. Local."""
    for table in _tables_of(locals_, masks):
        table.run(kernels("hold").mask, SIGNS=False)


def _tables_of(locals_: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> list[Table]:
    pieces = [
        Piece(bits_of(local.detach()).view(-1), i, out=mask.view(-1))
        for i, (local, mask) in enumerate(zip(locals_, masks, strict=True))
    ]
    made = tables_of(pieces, _BLOCK)
    for table in made:
        table.constants = {"WORD": table.constants["DTYPE"], "ALIGNED": table.constants["ALIGNED"], "BLOCK": _BLOCK}
    return made
