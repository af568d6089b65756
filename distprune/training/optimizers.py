"""What users pass as an optimizer: one of torch, several, or what holds some inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

Optimizers = Optimizer | Iterable[Any] | None


def unwrapped(optimizer: object) -> list[Optimizer]:
    """Return the optimizers whose ``step`` moves weights: those of a list, or inside a wrapper or a container. Local.

    A wrapper keeps the optimizer under ``optimizer`` (Accelerate, Lightning), a container under ``optimizers``
    (torchtitan).

    Raises:
        TypeError: there is none.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return unwrapped(inner)
    several = getattr(optimizer, "optimizers", None)
    if isinstance(several, list | tuple) and several:
        return [one for each in several for one in unwrapped(each)]
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, str | torch.Tensor):
        found = [one for each in optimizer for one in unwrapped(each)]
        if found:
            return found
    raise TypeError(f"expected a torch.optim.Optimizer, or several, not {optimizer!r}")


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, object]:
    """Return what ``optimizer`` keeps of ``parameter`` on this rank: nothing before its first step."""
    inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer: it steps a part of the parameters here
    state = (inner if isinstance(inner, Optimizer) else optimizer).state.get(parameter)  # not [...]: makes an entry
    return state if isinstance(state, dict) else {}
