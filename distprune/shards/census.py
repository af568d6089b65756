"""What a local shard holds: how many NaNs and zeros, and a checksum of its bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distprune.shards.local_shard import LocalShard, flat_chunks

__all__ = ["Census", "take_census"]

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Census:
    """Counts over the local elements. ``checksum`` is 0 where no replica needs comparing."""

    num_nans: int
    num_zeros: int
    checksum: int


def take_census(shard: LocalShard) -> Census:
    """Count in one read of the local elements, chunk by chunk.

    The checksum (of shards with replicas only) weighs every 64-bit word of a chunk by its place, so that
    replicas that differ in one bit differ in it, and swapped words do too.
    """
    num_nans = num_zeros = checksum = 0
    for start, values in flat_chunks(shard.local):
        num_zeros += values.numel() - int(torch.count_nonzero(values))
        # A NaN makes the sum NaN (as do infinities of both signs); only then are the NaNs counted.
        if values.is_floating_point() and bool(torch.isnan(values.sum(dtype=torch.float32))):
            num_nans += int(torch.isnan(values).sum())
        if shard.num_replicas != 1:
            checksum = (checksum * 31 + _chunk_checksum(values) + start) % (1 << 61)
    return Census(num_nans, num_zeros, checksum)


def _chunk_checksum(values: torch.Tensor) -> int:
    bits = values.contiguous().view(_INTEGER[values.element_size()]).to(torch.int64)
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits * (2 * place + 1)).sum()) % (1 << 61)
