"""What users pass as an optimizer: one of torch, several, or what holds some inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch.optim import Optimizer

Optimizers = Optimizer | Iterable[Any] | None


def unwrapped(optimizer: object) -> list[Optimizer]:
    """Return the optimizers whose ``step`` moves weights: those of a list, or inside a wrapper or a container. Local.

    A wrapper keeps the optimizer under ``optimizer`` (Accelerate, Lightning, Lookahead), ``base_optimizer`` (SAM) or
    ``optim`` (PostLocalSGD), a container under ``optimizers`` (torchtitan) or ``optimizer_dict`` (layer-wise GaLore of
    transformers). What is inside comes first: its steps count. A wrapper that writes weights itself follows if its own
    step runs torch's hooks.

    Raises:
        TypeError: there is none.
    """
    for name in ("optimizer", "base_optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer) and _covers(inner, optimizer):
            return [*unwrapped(inner), *([optimizer] if _runs_hooks(optimizer) else [])]
    several = getattr(optimizer, "optimizers", None) or getattr(optimizer, "optimizer_dict", None)
    if isinstance(several, list | tuple | dict) and several:
        return [one for each in _values(several) for one in unwrapped(each)]
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, str | torch.Tensor):
        found = [one for each in _values(optimizer) for one in unwrapped(each)]
        if found:
            return found
    raise TypeError(f"expected a torch.optim.Optimizer, or several, not {optimizer!r}")


def _covers(inner: Optimizer, optimizer: object) -> bool:
    """Return whether ``inner`` steps all that ``optimizer`` does: not with ZeRO, where other ranks step the rest."""
    if not isinstance(optimizer, Optimizer):
        return True
    own = {id(parameter) for parameter in parameters_of(inner)}
    return all(id(parameter) in own for parameter in parameters_of(optimizer))


def _runs_hooks(optimizer: object) -> TypeGuard[Optimizer]:
    """Return whether ``optimizer`` was made as torch's are: some wrappers call no ``Optimizer.__init__``."""
    if not isinstance(optimizer, Optimizer) or "_optimizer_step_pre_hooks" not in vars(optimizer):
        return False
    return hasattr(type(optimizer).step, "hooked")


def _values(several: Iterable[Any]) -> Iterable[Any]:
    return several.values() if isinstance(several, dict) else several


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters of ``optimizer``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: Optimizer, parameter: torch.Tensor) -> dict[str, object]:
    """Return what ``optimizer`` keeps of ``parameter`` on this rank: nothing before its first step."""
    inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer: it steps a part of the parameters here
    state = (inner if isinstance(inner, Optimizer) else optimizer).state.get(parameter)  # not [...]: makes an entry
    return state if isinstance(state, dict) else {}
