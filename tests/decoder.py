"""A small decoder: embedding, blocks, and a head tied to the embedding."""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import override

from tests.worlds import drawing

__all__ = ["BLOCK_WEIGHTS", "Decoder", "decoder"]


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 3 * size)
        self.down = nn.Linear(3 * size, size)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.down(self.up(self.norm(x)).relu()))


class Decoder(nn.Module):
    """Embedding, two blocks, and a head tied to the embedding."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, size)
        self.layers = nn.ModuleList([Block(size), Block(size)])
        self.head = nn.Linear(size, 11, bias=False)
        self.head.weight = self.embed.weight

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(x))


BLOCK_WEIGHTS = [f"layers.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]


def decoder() -> Decoder:
    """Return the same model on every rank."""
    with drawing(0):
        return Decoder()
