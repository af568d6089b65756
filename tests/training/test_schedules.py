"""What a schedule asks for after the last step is said."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from distprune.training.schedules import at_once, constant, cubic
from distprune.training.sparse_training import SparseTraining


@pytest.mark.parametrize(
    ("how", "num_steps", "said"),
    [
        ({"schedule": cubic(0.8, stop=40, every=10)}, 40, "after 40 steps with the schedule at 0.7875, .* on to 0.8:"),
        ({"schedule": cubic(0.8, stop=40, every=10)}, 35, "after 35 steps with the schedule at 0.7875, .* on to 0.8:"),
        ({"schedule": cubic(0.8, stop=40, every=10)}, 41, ""),
        ({"schedule": cubic(0.8, stop=40)}, 40, ""),  # less than a weight is missing
        ({"schedule": {"weight": constant(0.5), "bias": cubic(0.5, stop=9, every=3)}, "include": "*"}, 9, "at 0.4815,"),
        ({"schedule": at_once(0.5, step=3), "pattern": "2:4"}, 3, "with the schedule at 0, and it goes on to 0.5:"),
        ({"schedule": at_once(0.5, step=3), "pattern": "2:4"}, 4, ""),
        ({"schedule": constant(0.5)}, 1, ""),
        ({"schedule": constant(0.5)}, 0, ""),
    ],
)
def test_what_a_schedule_has_left_is_said(how: dict[str, Any], num_steps: int, said: str) -> None:
    """By a callback as well: it finishes in the same way."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = SparseTraining(model, optimizer, **how)
    for _ in range(num_steps):
        model(torch.ones(8)).sum().backward()
        optimizer.step()
    with pytest.warns(UserWarning, match=said) if said else contextlib.nullcontext():
        training.finish()
