"""Much that travels between a device and the host, piece after piece, through two pinned buffers.

While one piece is on its way, whoever fills or reads the other one works on: a disk and the copies overlap. What lies
on the CPU is not copied aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from distprune.shards.device import on_host


class _Buffers:
    """Two pinned buffers of the host, in turn."""

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]
        self._under_way: list[torch.Event | None] = [None, None]
        self._turn = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return the other buffer, as ``like``, once what it was last copied from or to is done."""
        self._turn ^= 1
        self.wait(self._turn)
        if self._memory[self._turn].numel() < like.nbytes:
            self._memory[self._turn] = _pinned(like.nbytes)
        return self._memory[self._turn][: like.nbytes].view(like.dtype).view(like.shape)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> int:
        """Begin to copy from or to the buffer that was last taken, and return its number."""
        self._under_way[self._turn] = _begin_copy(target, source)
        return self._turn

    def wait(self, number: int) -> None:
        if (event := self._under_way[number]) is not None:
            event.synchronize()


def send_in_turn(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write into the first tensor of each of ``pairs``, on any device, the second, on the CPU. Local.

    The next pair is asked for while the last two are on their way.
    """
    buffers = _Buffers()
    for target, values in pairs:
        if on_host(target.device):
            target.copy_(values)
            continue
        staged = buffers.take(values)
        staged.copy_(values)
        buffers.copy(target, staged)


def fetch_in_turn(pieces: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield ``pieces``, of any device, on the CPU; each until the next one is asked for. Local.

    While one is worked on, the next one is on its way.
    """
    buffers, last = _Buffers(), list[tuple[int, torch.Tensor]]()
    for piece in pieces:
        if on_host(piece.device):
            yield piece
            continue
        staged = buffers.take(piece)
        last.append((buffers.copy(staged, piece), staged))
        if len(last) > 1:
            number, before = last.pop(0)
            buffers.wait(number)
            yield before
    for number, staged in last:
        buffers.wait(number)
        yield staged


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _begin_copy(target: torch.Tensor, source: torch.Tensor) -> torch.Event:
    """Copy between a device and pinned memory; return what says when that is done."""
    target.copy_(source, non_blocking=True)
    event = torch.Event(source.device if target.device.type == "cpu" else target.device)
    event.record()
    return event
