"""A number that differs for tensors that differ in one bit, or in the order of their elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distprune.shards.local_shard import bits_of, flat_chunks

_FACTOR = 0x5851F42D4C957F2D  # between tensors: Knuth's, of MMIX; int64 wraps


def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number, int64 on their device, that follows from the bits of ``tensors``; local, waits for nothing."""
    total = torch.ones((), dtype=torch.int64, device=tensors[0].device if tensors else "cpu")
    for tensor in tensors:
        total = total * _FACTOR + tensor.numel()
        for start, values in flat_chunks(tensor.detach()):
            real = torch.view_as_real(values).flatten() if values.is_complex() else values.contiguous()
            bits, start = bits_of(real).to(torch.int64), start * (len(real) // len(values))
            if real.itemsize == 8:  # of two signs, each times an odd number, the sum would be that of none
                bits = bits ^ (bits >> 32)
            # Every element's bits are weighed by its place.
            total += (bits * torch.arange(2 * start + 3, 2 * (start + len(bits)) + 3, 2, device=bits.device)).sum()
    return total
