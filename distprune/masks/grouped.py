"""Shards on a device and their masks: operations on all of them follow their bytes, not how many there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch

from distprune.masks.in_place import views_by_chunk
from distprune.shards.device import batches, chunk_size, sent
from distprune.shards.local_shard import bits_of

_Piece = tuple[int, torch.Tensor, torch.Tensor]  # the number of a shard, some of its bits, and of its mask

_BLOCK = 1 << 8  # flags of one shard that are counted together
_NUM_CHUNKS = 4  # whose flags there is memory for, twice


@final
class Grouped:
    """Shards on one ``device``, each with its mask (bool, same local shape), in groups of some chunks' elements."""

    def __init__(self, shards: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
        self._shards, self._device = shards, device
        self._addresses: list[int] = []
        self._groups: list[_Group] = []
        self._numels = sent(
            torch.tensor([local.numel() for local, _ in shards], dtype=torch.int64, device="cpu"), device
        )

    @torch.no_grad()
    def read(self, least: torch.Tensor) -> torch.Tensor:
        """As :func:`distprune.masks.in_place.read_kept` for each shard; return its counts, (shards, 3), int64. Local.

        ``least``: of each shard, on the device, as what is returned: the host does not wait.
        """
        groups = self._up_to_date()
        num_kept, num_changed = torch.zeros_like(self._numels), torch.zeros_like(self._numels)
        for group in groups:
            group.look()
            group.count(group.now, num_kept)
        too_few = self._numels - num_kept < least
        num_kept.zero_()
        for group in groups:
            group.look()
            group.before.zero_()
            torch._foreach_copy_(group.flags_before, group.masks)
            torch.where(too_few[group.owners, None], group.before, group.now, out=group.now)
            group.count(group.now, num_kept)
            torch._foreach_copy_(group.masks, group.flags)
            group.count(group.before.logical_xor_(group.now), num_changed)
        return torch.stack([num_changed, self._numels - num_kept, too_few], 1)

    @torch.no_grad()
    def write_signed_zeros(self) -> None:
        """Do with each shard as :func:`distprune.masks.in_place.write_signed_zeros`. Local."""
        for group in self._up_to_date():
            group.look()
            group.now.logical_not_()
            zeros = [flags.view(torch.int8) for flags in group.flags]
            torch._foreach_add_(group.bits, zeros, alpha=torch.iinfo(group.bits[0].dtype).min)  # a sign for each zero
            torch._foreach_mul_(group.bits, group.masks)

    def _up_to_date(self) -> list[_Group]:
        addresses = [local.data_ptr() for local, _ in self._shards]
        if addresses != self._addresses:  # memory can move under a tensor
            self._addresses, self._groups = addresses, self._made()
        return self._groups

    def _made(self) -> list[_Group]:
        pieces = [*self._pieces()]
        nums = [[-(-bits.numel() // _BLOCK) for _, bits, _ in of_group] for of_group in pieces]
        owners = [np.repeat([owner for owner, _, _ in of], of_nums) for of, of_nums in zip(pieces, nums, strict=True)]
        all_owners = sent(torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *owners])), self._device)
        shape = 2, max((sum(of_nums) for of_nums in nums), default=0), _BLOCK
        memory = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return [
            _Group.of(of_group, own, memory[:, : len(own)])
            for of_group, own in zip(pieces, torch.split(all_owners, [*map(sum, nums)]), strict=True)
        ]

    def _pieces(self) -> Iterator[list[_Piece]]:
        """Yield groups of pieces, each of one dtype."""
        most = _NUM_CHUNKS * chunk_size(self._device)
        by_dtype: dict[torch.dtype, list[_Piece]] = {}
        for i, (local, mask) in enumerate(self._shards):
            if local.numel():
                bits = bits_of(local)
                by_dtype.setdefault(bits.dtype, []).extend((i, *views) for views in views_by_chunk(bits, mask))
        for pieces in by_dtype.values():
            for which in batches(range(len(pieces)), [bits.numel() for _, bits, _ in pieces], most):
                yield [pieces[i] for i in which]


@dataclass(frozen=True)
class _Group:
    """Pieces of shards: their ``bits`` and ``masks``, and a flag for each element, for what is ``now`` and was before.

    ``now`` and ``before`` are (blocks, ``_BLOCK``); ``owners``: the shard of each block. All groups share that memory.
    """

    owners: torch.Tensor
    bits: list[torch.Tensor]
    masks: list[torch.Tensor]
    now: torch.Tensor
    before: torch.Tensor
    flags: list[torch.Tensor]
    flags_before: list[torch.Tensor]

    @staticmethod
    def of(pieces: Sequence[_Piece], owners: torch.Tensor, memory: torch.Tensor) -> _Group:
        views: list[list[torch.Tensor]] = [[], []]
        first = 0
        for _, bits, _ in pieces:
            for flat, into in zip(memory.flatten(1), views, strict=True):
                into.append(flat[first : first + bits.numel()].view(bits.shape))
            first += -(-bits.numel() // _BLOCK) * _BLOCK
        return _Group(owners, [bits for _, bits, _ in pieces], [mask for _, _, mask in pieces], *memory, *views)

    def look(self) -> None:
        """Write into ``now`` which bits are not 0, and False into the rest of the blocks."""
        self.now.zero_()
        torch._foreach_copy_(self.flags, self.bits)

    def count(self, flags: torch.Tensor, nums: torch.Tensor) -> None:
        """Add to ``nums``, of the shards, how many of ``flags`` are True."""
        nums.index_add_(0, self.owners, flags.sum(1))
