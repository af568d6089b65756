"""A number that tells tensors apart which differ in one bit or in order."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from distprune.shards.local_shard import flat_chunks

__all__ = ["checksum"]

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number below 2**61 that follows from the bits of ``tensors``; local, one wait for a device each."""
    total = 0
    for tensor in tensors:
        found = [(start, _weighed(values)) for start, values in flat_chunks(tensor.detach())]
        sums = torch.stack([weighed for _, weighed in found]).tolist() if found else []
        for (start, _), of_chunk in zip(found, sums, strict=True):
            total = (total * 31 + of_chunk % (1 << 61) + start) % (1 << 61)
    return total


def _weighed(values: torch.Tensor) -> torch.Tensor:
    """Weigh every element's bits by its place."""
    values = values.contiguous()
    bits = (values if values.dtype is not torch.bool else values.view(torch.uint8)).view(
        _INTEGER[values.element_size()]
    )
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    return (bits.to(torch.int64) * (2 * place + 1)).sum()
