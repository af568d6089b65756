"""Many small shards and their masks: what a call for each would cost is paid once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch

from distprune.masks.in_place import counts_of_read
from distprune.shards.device import chunk_size
from distprune.shards.local_shard import bits_of


@final
class SideBySide:
    """Small shards, each with its mask (bool, same local shape), in runs of about a chunk's elements."""

    def __init__(self, shards: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._locals = [local for local, _ in shards]
        self._masks = [mask.numpy() for _, mask in shards]
        self._addresses: list[int] = []
        self._bits: list[npt.NDArray[Any]] = []
        ends = np.cumsum([0, *(mask.size for mask in self._masks)])
        chunks = (ends[:-1] // chunk_size(torch.device("cpu"))).tolist()
        self._runs: list[tuple[int, npt.NDArray[np.int64]]] = []  # the first, and where each ends within its run
        for i, chunk in enumerate(chunks):
            if i == 0 or chunk != chunks[i - 1]:
                stop = i + chunks[i:].count(chunk)
                self._runs.append((i, ends[i + 1 : stop + 1] - ends[i]))

    def differing(self) -> list[int]:
        """Return which shards are other than +0.0 in other places than their masks say. Local."""
        addresses = [local.data_ptr() for local in self._locals]
        if addresses != self._addresses:  # memory can move under a tensor: share_memory_()
            self._addresses, self._bits = addresses, [bits_of(local).numpy() for local in self._locals]
        found: list[int] = []
        for first, ends in self._runs:
            run = slice(first, first + len(ends))
            differs = np.concatenate(self._bits[run], axis=None) != 0
            differs ^= np.concatenate(self._masks[run], axis=None)
            if differs.any():
                found += (np.unique(np.searchsorted(ends, np.flatnonzero(differs), "right")) + first).tolist()
        return found

    def read(self, i: int, least: int) -> tuple[int, int, bool]:
        """Do with shard ``i`` as :func:`distprune.masks.in_place.read_kept`, right after :meth:`differing`. Local."""
        bits, mask = self._bits[i], self._masks[i]
        too_few = bits.size - int(np.count_nonzero(bits)) < least
        return *counts_of_read(bits, mask, too_few), too_few
