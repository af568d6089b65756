"""A model in whole numbers: with steps of powers of two all sums are exact, so layouts agree to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from tests.worlds import drawing
from tests.wrapped import PRUNED, Wrapped, whole

__all__ = ["NUM_STEPS", "Exact", "Layers", "Weights", "backward", "check", "inputs", "sgd", "step", "weights"]

SIZE, HIDDEN, NUM_SAMPLES, NUM_STEPS = 12, 20, 12, 4
Weights = dict[str, torch.Tensor]


class Layers(nn.Module):
    """The linear layers of a block of ``tests.wrapped``, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        for name in "qkvo":
            self.attention.register_module(name, nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64))
        self.up = nn.Linear(SIZE, HIDDEN, bias=False, dtype=torch.float64)
        self.down = nn.Linear(HIDDEN, SIZE, bias=False, dtype=torch.float64)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -5, 5).data.round_()

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = [layer(x) for layer in (*map(self.attention.get_submodule, "qkv"), self.up)]
        last = [self.attention.get_submodule("o")(first[0].sign()), self.down(first[-1].sign())]
        return torch.stack([(out - 3).square().sum() for out in (*first, *last)]).sum()


class Exact(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with drawing(0):
            self.layers = nn.ModuleList([Layers(), Layers()])

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layers(x) for layers in self.layers]).sum()


def inputs(num: int = NUM_STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(-1, 2, (NUM_SAMPLES, SIZE), generator=generator).double() for _ in range(num)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2**-8, momentum=0.5)


def backward(wrapped: Wrapped, x: torch.Tensor, scale: float = 1.0) -> float:
    loss = wrapped.model(x.chunk(wrapped.num_data_ranks)[wrapped.data_rank])
    (loss * scale * wrapped.num_data_ranks).backward()  # gradients are averaged
    return float(loss.detach())


def step(wrapped: Wrapped, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    backward(wrapped, x)
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module) -> Weights:
    """Return the weights to prune, whole. Every rank must call it."""
    bare = getattr(model, "module", model)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):  # nothing, elsewhere
        names = [f"layers.{i}.{name}.weight" for i in range(2) for name in PRUNED]
        return {name: whole(bare.get_parameter(name)) for name in names}


def check(got: Weights, expected: Weights) -> None:
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(got[name], weight), name
