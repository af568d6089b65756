"""Which steps of an optimizer count, and where training goes on if they are set."""

from __future__ import annotations

import copy
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
        return float(loss.detach())

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


def _loaded(training: prune.SparseTraining, model: nn.Module, state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    training.load_state_dict(state["training"])


def _set(training: prune.SparseTraining, _: nn.Module, state: dict[str, Any]) -> None:
    training.step = state["training"]["step"]


@pytest.mark.parametrize("go_back", [_loaded, _set])
@pytest.mark.parametrize("to", [0, 2, 5])
def test_going_back(go_back: Callable[..., None], to: int) -> None:
    """Weights that are zero by nature, such as those here of the second layer, learn until the schedule starts."""
    layers = nn.Linear(8, 8), nn.Linear(8, 8)
    nn.init.zeros_(layers[1].weight)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = prune.SparseTraining(model, optimizer, schedule=prune.cubic(0.5, start=3, stop=6))
    evaluate, states, zeros = gradients(model), list[dict[str, Any]](), list[int]()
    for step in [*range(8), *range(to, 8)]:
        if len(states) == 8:
            go_back(training, model, states[to])
        assert training.step == step
        states.append(copy.deepcopy({"model": model.state_dict(), "training": training.state_dict()}))
        evaluate()
        optimizer.step()
        zeros.append(sum(int((layer.weight == 0).sum()) for layer in layers))
    assert zeros[:8] == [0, 0, 0, *zeros[3:6], 64, 64]
    if go_back is _loaded:
        assert zeros[8:] == zeros[to:8]
    assert (zeros[8] < 64, zeros[-1]) == (to < 3 or go_back is _loaded, 64)
