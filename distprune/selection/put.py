"""Where a choice is written: a `Put` takes what stays of one shard, or of a piece of one, range by range."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from distprune.shards.device import chunk_size, on_host

Array = npt.NDArray[Any]

_HOST_NUMEL = 1 << 18  # elements that are decided at a time and put: they stay in a core's cache until they are used


def put_size(device: torch.device) -> int:
    """Return how many elements are decided at a time, and put."""
    return _HOST_NUMEL if on_host(device) else chunk_size(device)


class Put(ABC):
    """Takes what stays of some weights, one range of local offsets after the other.

    A pattern calls :meth:`stays` for each range. The buffer may be reused as soon as the call returns. The other
    methods save copies: :meth:`flags` and :meth:`bits` say where the next range is best written.
    """

    _scratch = torch.empty(0, dtype=torch.bool, device="cpu")

    @abstractmethod
    def stays(self, at: slice, stays: torch.Tensor) -> None:
        """Take which of the elements ``at`` stay: bool, 1-D, on the device of the weights."""

    def take(self, stays: torch.Tensor) -> None:
        """Take which of all elements stay, as :meth:`stays` does, and the memory with it."""
        self.stays(slice(0, len(stays)), stays)

    def flags(self, at: slice, device: torch.device) -> torch.Tensor:
        """Return memory, bool, 1-D, for what stays ``at``; the next call may return it again."""
        num = at.stop - at.start
        if len(self._scratch) < num or self._scratch.device != device:
            self._scratch = torch.empty(num, dtype=torch.bool, device=device)
        return self._scratch[:num]

    def bits(self, at: slice) -> Array | None:  # noqa: ARG002
        """Return memory for the bits of the weights ``at``, which lie on the host; ``None``: flags are wanted."""
        return None

    def left(self, at: slice, left: Array) -> None:  # noqa: B027
        """Take, in memory of :meth:`bits`, the bits of the weights ``at``, 0 where they are pruned."""


@final
class MaskPut(Put):
    """Writes ``mask``: bool, contiguous, True = keep."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, mask: torch.Tensor | None = None) -> None:
        self._shape, self._device = shape, device
        self._own = None if mask is None else mask.view(-1)  # made when it is needed

    @staticmethod
    def empty(shape: tuple[int, ...], device: torch.device) -> MaskPut:
        """Return one with a new mask; on a device there is none before it is needed."""
        if on_host(device):  # numpy asks for huge pages: the first write to small ones takes as long as the choice
            return MaskPut(shape, device, torch.from_numpy(np.empty(shape, dtype=np.bool_)))
        return MaskPut(shape, device)

    @property
    def mask(self) -> torch.Tensor:
        return self._flat.view(self._shape)

    @property
    def _flat(self) -> torch.Tensor:
        if self._own is None:
            self._own = torch.empty(math.prod(self._shape), dtype=torch.bool, device=self._device)
        return self._own

    @override
    def take(self, stays: torch.Tensor) -> None:
        if self._own is None:
            self._own = stays
        else:
            super().take(stays)

    @override
    def flags(self, at: slice, device: torch.device) -> torch.Tensor:
        return self._flat[at]

    @override
    def stays(self, at: slice, stays: torch.Tensor) -> None:
        own = self._flat[at]
        if own.data_ptr() != stays.data_ptr():
            own.copy_(stays)


def put_all(puts: Sequence[Put], stays: torch.Tensor, numels: Sequence[int]) -> None:
    """Have each of ``puts`` take all of its elements, ``numels`` each, which ``stays`` has one after the other."""
    parts = torch.split(stays, [*numels])
    if all(isinstance(put, MaskPut) for put in puts):
        torch._foreach_copy_([put.flags(slice(None), stays.device) for put in puts], [*parts])
        return
    for put, num, part in zip(puts, numels, parts, strict=True):
        put.stays(slice(0, num), part)
