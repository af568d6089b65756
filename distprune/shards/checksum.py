"""A number that differs for tensors that differ in one bit, or in the order of their elements."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from distprune.kernels import compiled
from distprune.shards.local_shard import bytes_of, flat_chunks

__all__ = ["HostChecksum", "checksum"]

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Sums of 8 bytes each. A prime: pages of 4 KiB that change places within a stretch, of 2 MiB, change lanes.
_NUM_LANES, _NUM_ROWS = 1021, 256
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
    """A checksum of tensors on the host, one after the other, at the speed of memory; how they are cut is no matter.

    Fletcher's (IEEE Transactions on Communications 30, 1982), of stretches, each summed in many lanes of 8 bytes: a sum
    sees a changed word, and one that moved to another lane; the sum of those sums, stretches that changed places.
    """

    def __init__(self) -> None:
        self._loops = compiled()
        self._sums = np.zeros((2, _NUM_LANES), dtype=np.uint64)  # they wrap around
        self._row = np.zeros(self._sums[0].nbytes, dtype=np.uint8)  # the one that is not full
        self._num_bytes = 0

    def add(self, values: torch.Tensor | npt.NDArray[Any]) -> None:
        """Take over the bits of ``values``. Local."""
        data, size = bytes_of(values), len(self._row)
        num_bytes, self._num_bytes = self._num_bytes, self._num_bytes + len(data)
        if self._loops is not None:
            self._loops.add_bytes(self._sums, _NUM_ROWS, self._row, num_bytes, data)
            return
        if filled := num_bytes % size:
            num = min(size - filled, len(data))
            self._row[filled : filled + num] = data[:num]
            if filled + num < size:
                return
            self._add(self._row.view(np.uint64)[None], num_bytes // size)
            num_bytes, data = num_bytes + num, data[num:]
        end = len(data) - len(data) % size
        self._add(data[:end].view(np.uint64).reshape(-1, _NUM_LANES), num_bytes // size)
        self._row[: len(data) - end] = data[end:]

    def _add(self, rows: npt.NDArray[np.uint64], index: int) -> None:
        """Add ``rows``, of which the first is row ``index`` of all."""
        first, second = self._sums
        start = 0
        while start < len(rows):
            some = rows[start : start + _NUM_ROWS - index % _NUM_ROWS]
            first += np.add.reduce(some, axis=0)
            start, index = start + len(some), index + len(some)
            if index % _NUM_ROWS == 0:
                second += first

    def digest(self) -> bytes:
        """Return 32 bytes, which tell what was added from almost anything else."""
        rest = self._row[: self._num_bytes % len(self._row)]
        return hashlib.sha256(self._sums.tobytes() + rest.tobytes() + self._num_bytes.to_bytes(8, "little")).digest()
