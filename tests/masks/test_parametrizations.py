"""Masks and torch's parametrizations of different weights in one module: either may come, and go, first."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import distprune as prune
from tests.worlds import drawing

ACTS: dict[str, Any] = {
    "prune": lambda by, module, masked, _: by.l1_unstructured(module, masked, 0.5),
    "remove": lambda by, module, masked, _: by.remove(module, masked),
    "parametrize": lambda _, module, __, normed: parametrizations.weight_norm(module, normed),
    "plain": lambda _, module, __, normed: parametrize.remove_parametrizations(module, normed),
}
ORDERS = [
    order
    for order in itertools.permutations(ACTS)
    if order.index("prune") < order.index("remove") and order.index("parametrize") < order.index("plain")
]


def outputs(by: Any, module: nn.Module, names: tuple[str, str], order: tuple[str, ...]) -> list[torch.Tensor]:
    """Return what ``module`` makes of ones after each act."""
    made = []
    for act in order:
        ACTS[act](by, module, *names)
        output = module(torch.ones(2, 3, 8))
        made.append(output[0] if isinstance(output, tuple) else output)
    assert type(module) in (nn.LSTM, nn.Linear)
    assert "parametrizations" not in dict(module.named_children())
    return made


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("names", [("weight_ih_l0", "weight_hh_l0"), ("bias", "weight")])
def test_a_mask_beside_a_parametrization(names: tuple[str, str], order: tuple[str, ...]) -> None:
    with drawing(0):
        module = nn.Linear(8, 8) if "weight" in names else nn.LSTM(8, 8)
    theirs = outputs(torch_prune, copy.deepcopy(module), names, order)
    assert all(map(torch.equal, outputs(prune, module, names, order), theirs))
