"""A number that differs for tensors that differ in one bit, or in the order of their elements."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from distprune.shards.local_shard import flat_chunks

__all__ = ["HostChecksum", "checksum"]

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUM_LANES = 1 << 13  # sums of 8 bytes each; with fewer, calls of numpy take longer than the sums
_FACTOR = 0x5851F42D4C957F2D  # between tensors: Knuth's, of MMIX; int64 wraps


def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number, int64 on their device, that follows from the bits of ``tensors``; local, waits for nothing."""
    total = torch.ones((), dtype=torch.int64, device=tensors[0].device if tensors else "cpu")
    for tensor in tensors:
        total = total * _FACTOR + tensor.numel()
        for start, values in flat_chunks(tensor.detach()):
            bits = values.contiguous().view(_INTEGER[values.element_size()]).to(torch.int64)
            # Every element's bits are weighed by its place.
            total += (bits * torch.arange(2 * start + 3, 2 * (start + len(bits)) + 3, 2, device=bits.device)).sum()
    return total


class HostChecksum:
    """A checksum of tensors on the host, one after the other, at the speed of memory.

    Fletcher's (IEEE Transactions on Communications 30, 1982) in many lanes: sums of every lane's words, which see a
    changed word, and sums of those sums, which see words that changed places.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((2, _NUM_LANES), dtype=np.uint64)  # they wrap around

    def add(self, values: torch.Tensor) -> None:
        """Take over the bits of ``values``. Local."""
        data = values.contiguous().view(-1).view(torch.uint8).numpy()
        end = len(data) - len(data) % self._sums[0].nbytes
        rest = np.zeros_like(self._sums[0])
        rest.view(np.uint8)[: len(data) - end] = data[end:]
        first, second = self._sums
        for row in (*data[:end].view(np.uint64).reshape(-1, _NUM_LANES), rest):
            first += row
            second += first

    def digest(self) -> bytes:
        """Return 32 bytes, which tell what was added from almost anything else."""
        return hashlib.sha256(self._sums.data).digest()
