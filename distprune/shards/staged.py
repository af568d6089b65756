"""Much that travels between a device and the host, piece after piece, through two pinned buffers.

While one piece is on its way, whoever fills or reads the other one works on: a disk and the copies overlap. What lies
on the CPU is not copied aside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from distprune.shards.device import on_host


class _Buffer:
    """A pinned buffer of the host."""

    def __init__(self) -> None:
        self._memory = self._staged = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copied: torch.Event | None = None

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer, as ``like``, once what was last copied from or to it is done."""
        self.arrived()
        if self._memory.numel() < like.nbytes:
            self._memory = _pinned(like.nbytes)
        self._staged = self._memory[: like.nbytes].view(like.dtype).view(like.shape)
        return self._staged

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy from or to the buffer."""
        self._copied = _begin_copy(target, source)

    def arrived(self) -> torch.Tensor:
        """Return what was last taken, once it is copied."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._staged


def send_in_turn(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write into the first tensor of each of ``pairs``, on any device, the second, on the CPU. Local.

    The next pair is asked for while the last two are on their way.
    """
    buffers = itertools.cycle((_Buffer(), _Buffer()))
    for target, values in pairs:
        if on_host(target.device):
            target.copy_(values)
        else:
            buffer = next(buffers)
            staged = buffer.take(values)
            staged.copy_(values)
            buffer.copy(target, staged)


def fetch_in_turn(pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield ``pieces``, of any device, on the CPU; each until the next one is asked for. Local.

    While one is worked on, the next one is on its way.
    """
    buffers, coming = itertools.cycle((_Buffer(), _Buffer())), list[_Buffer]()
    for piece in pieces:
        if on_host(piece.device):
            yield piece
            continue
        buffer = next(buffers)
        buffer.copy(buffer.take(piece), piece)
        coming.append(buffer)
        if len(coming) > 1:
            yield coming.pop(0).arrived()
    for buffer in coming:
        yield buffer.arrived()


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _begin_copy(target: torch.Tensor, source: torch.Tensor) -> torch.Event:
    """Copy between a device and pinned memory; return what says when that is done."""
    target.copy_(source, non_blocking=True)
    event = torch.Event(source.device if target.device.type == "cpu" else target.device)
    event.record()
    return event
