"""What patterns choose by kernels is what they choose on the host, in Triton's interpreter."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import distprune as prune
from distprune.kernels.table import Table

SHAPES = [(6, 32), (8, 64), (3, 32)]


def model(dtype: torch.dtype, kind: str) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Linear(i, o, bias=False, dtype=dtype) for o, i in SHAPES))
    with torch.no_grad():
        for weight in layers.parameters():
            values = torch.randn(weight.shape)
            weight.copy_((values * 2).round() / 2 if kind == "ties" else values)
            weight.grad = torch.randn(weight.shape).to(dtype)
    return layers


def zeros(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["normal", "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "3:8", "row"])
@pytest.mark.sampled(5)
def test_rows_and_groups(pattern: str, dtype: torch.dtype, kind: str) -> None:
    how: dict[str, Any] = {"pattern": pattern, "include": "*"} | ({"sparsity": 0.3} if pattern == "row" else {})
    here, there = model(dtype, kind), model(dtype, kind)
    with patch("distprune.kernels.available._DEVICES", ()):
        report = prune.prune_model(here, **how)
    with patch.object(Table, "run", autospec=True, side_effect=Table.run) as launched:
        other = prune.prune_model(there, **how)
    assert launched.call_count == (1 if pattern != "row" else 2)
    assert all(map(torch.equal, zeros(here), zeros(there)))
    assert report.parameters == other.parameters
