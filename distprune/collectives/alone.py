"""One process without a launcher: every collective is the identity."""

from __future__ import annotations

from typing import final

import torch
from typing_extensions import override

from distprune.collectives.base import Communicator


@final
class Alone(Communicator):
    """A group of one. Counts the rounds it would have taken part in, so that figures compare."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    @override
    def _reduce_in_place(self, values: torch.Tensor, op: str, rank: int | None) -> None:
        pass

    @override
    def _broadcast_in_place(self, buffer: torch.Tensor, source: int) -> None:
        pass

    @override
    def _gather_bytes(self, buffer: torch.Tensor) -> list[bytes]:
        return [bytes(buffer.numpy())]

    @override
    def _swap_bytes(self, sent: torch.Tensor, sent_sizes: list[int], sizes: list[int]) -> torch.Tensor:
        return sent
