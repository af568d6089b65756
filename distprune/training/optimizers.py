"""What users pass as an optimizer: one of torch, several, or what holds some inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch.optim import Optimizer

from distprune.collectives.agree import max_together
from distprune.collectives.base import Communicator
from distprune.shards.device import fetched, on_host
from distprune.shards.layouts import local_of
from distprune.shards.local_shard import LocalShard

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
    inner = inside(optimizer)
    if inner is not None:
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
    raise TypeError(f"expected a torch.optim.Optimizer, or several, not {_shown(optimizer)}")


def _shown(thing: object) -> str:
    """Return a class by its name, a text as it is, and of other things their class."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}: make one of the model's parameters"
    return repr(thing) if isinstance(thing, str) else f"a {type(thing).__name__}"


def inside(optimizer: object) -> Optimizer | None:
    """Return the optimizer that ``optimizer`` wraps, if it does. Local."""
    for name in ("optimizer", "base_optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer) and _covers(inner, optimizer):
            return inner
    return None


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


def check_moves(optimizers: Sequence[Optimizer], shards: Sequence[LocalShard], *, moves: bool) -> None:
    """Check that ``optimizers`` move one of ``shards`` at least, if some have elements on this rank. Local.

    Raises:
        ValueError: they move none.
    """
    if moves or not optimizers or not any(shard.local.numel() for shard in shards):
        return
    names = ", ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
    none = f"none of the {len(shards)} pruned parameters is among those of {names}"
    if not any(shard.tensor is None or shard.tensor.requires_grad for shard in shards):
        raise ValueError(
            f"{none}: they are frozen (requires_grad=False), as under PEFT's adapters, so their zeros stay "
            "without this: prune first, and merge adapters with distprune.merge_adapters(model)"
        )
    raise ValueError(f"{none}; make the optimizer from the parameters of this model, after it is sharded")


def only_makes_state(comm: Communicator, optimizer: Optimizer) -> bool:
    """Return whether this is no step of training. At a learning rate of 0, every rank must call it: one round.

    torch.distributed.checkpoint makes the state of a fresh optimizer by a step at rate 0, with gradients of zero.
    """
    if any(float(group.get("lr", 1)) != 0 for group in optimizer.param_groups):
        return False
    gradients = [local_of(parameter.grad) for parameter in parameters_of(optimizer) if parameter.grad is not None]

    def fill(any_there: torch.Tensor) -> None:
        here = any(bool(gradient.any()) for gradient in gradients if on_host(gradient.device))
        there = [] if here else [gradient.any() for gradient in gradients if not on_host(gradient.device)]
        any_there[0] = here or any(map(bool, fetched(there)))

    return not bool(max_together(comm, (1,), fill)[0])
