"""Which steps of an optimizer count, and where training goes on if they are set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

import distprune as prune


class Shaken(torch.optim.SGD):
    """Moves all weights once more, after the step of its base class."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1e-3)
        return loss


def gradients(model: nn.Module) -> Callable[[], float]:
    def evaluate() -> float:
        model.zero_grad()
        loss = (model(torch.ones(8)) - 1).square().mean()
        loss.backward()
        return float(loss)

    return evaluate


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_that_calls_that_of_its_base_class(with_closure: bool) -> None:
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch calls hooks in the step of each class that it made one of
    model = nn.Linear(8, 8)
    optimizer = Shaken(model.parameters(), lr=0.1)
    training = prune.SparseTraining(model, optimizer, schedule=prune.stepwise({0: 0.25, 1: 0.5, 2: 0.75}))
    evaluate = gradients(model)
    for num in range(1, 4):
        if with_closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        assert (training.step, int((model.weight == 0).sum())) == (num, 16 * num)
