"""What a local shard holds: how many NaNs and zeros, and a checksum of its bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distprune.shards.local_shard import LocalShard, flat_chunks

__all__ = ["Census", "checksum", "take_census"]

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Census:
    """Counts over the local elements. ``checksum`` is 0 where no replica needs comparing."""

    num_nans: int
    num_zeros: int
    checksum: int


def take_census(shard: LocalShard, *, zeros_of: torch.Tensor | None = None, reads_values: bool = True) -> Census:
    """Count in one read of the local elements, chunk by chunk.

    The zeros counted are those of ``zeros_of`` (local shape; none where it is ``None``). Without
    ``reads_values`` the shard's own values are left alone. The checksum, of shards with replicas only,
    is of what is read.
    """
    num_nans = num_zeros = total = 0
    has_replicas = shard.num_replicas != 1
    if reads_values:
        for start, values in flat_chunks(shard.local):
            # A NaN makes the sum NaN (as do infinities of both signs); only then are the NaNs counted.
            if values.is_floating_point() and bool(torch.isnan(values.sum(dtype=torch.float32))):
                num_nans += int(torch.isnan(values).sum())
            if zeros_of is shard.local:
                num_zeros += values.numel() - int(torch.count_nonzero(values))
            if has_replicas:
                total = _joined(total, values, start)
    if zeros_of is not None and not (reads_values and zeros_of is shard.local):
        for start, values in flat_chunks(zeros_of):
            num_zeros += values.numel() - int(torch.count_nonzero(values))
            if has_replicas:
                total = _joined(total, values, start)
    return Census(num_nans, num_zeros, total)


def checksum(tensor: torch.Tensor) -> int:
    """Return a number below 2**61 that tells tensors apart which differ in one bit or in order."""
    total = 0
    for start, values in flat_chunks(tensor.detach()):
        total = _joined(total, values, start)
    return total


def _joined(total: int, values: torch.Tensor, start: int) -> int:
    """Weigh every 64-bit word of a chunk by its place, and every chunk by its own."""
    values = values.contiguous()
    bits = (values if values.dtype is not torch.bool else values.view(torch.uint8)).view(
        _INTEGER[values.element_size()]
    )
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    of_chunk = int((bits.to(torch.int64) * (2 * place + 1)).sum()) % (1 << 61)
    return (total * 31 + of_chunk + start) % (1 << 61)
