"""What users pass as an optimizer: one of torch, several, or what holds some inside; and hooks on their steps."""

from __future__ import annotations

import sys
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from distprune.collectives.agree import max_together
from distprune.collectives.base import Communicator
from distprune.shards.device import fetched, on_host
from distprune.shards.layouts import local_of
from distprune.shards.local_shard import LocalShard
from distprune.shards.parameter_range import ranges_of
from distprune.shards.torch_private import private

Optimizers = Optimizer | Iterable[Any] | None
outside_dynamo = private("torch", "_disable_dynamo")
_STEP = Optimizer.profile_hook_step(lambda _: None).__code__  # of torch's function around a step, which calls the hooks


class OnSteps(ABC):
    """Does something before each step of some optimizers, once the gradients are there, and after it.

    The hooks live on the optimizers, which keep this alive, or on all that there are, which do not, whatever wraps the
    model. A step with a closure has its gradients once the closure was called: ``_before_closure`` comes first, as the
    step begins, and ``_before_step`` after the closure. ``_each_time``: both as often as the optimizer calls the
    closure. A step that another of the same optimizer calls, such as that of its base class, is a part of that one.
    Hooks go with neither a copy nor a pickle: a copy of what had some registers its own.
    """

    _each_time: ClassVar[bool] = False

    def __init__(self, *, of_all: bool = False) -> None:
        self._of_all = of_all
        self._optimizers: list[Optimizer] = []
        self._handles: list[RemovableHandle] = []

    @abstractmethod
    def _before_closure(self, optimizer: Optimizer) -> None: ...

    @abstractmethod
    def _before_step(self, optimizer: Optimizer) -> None: ...

    @abstractmethod
    def _after_step(self, optimizer: Optimizer) -> None: ...

    def _attach(self) -> None:
        while _gone:
            _gone.pop().remove()
        if self._of_all:
            self._handles.append(register_optimizer_step_pre_hook(_weak(self._at_begin)))
            self._handles.append(register_optimizer_step_post_hook(_weak(self._at_end)))
            weakref.finalize(self, _gone.extend, self._handles)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._at_begin))
            self._handles.append(optimizer.register_step_post_hook(self._at_end))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @override
    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_handles": bool(self._handles)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _handles=[])
        if state["_handles"]:
            self._attach()

    @outside_dynamo  # type: ignore[untyped-decorator]
    def _at_begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_within_another(optimizer):
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if closure is None:
            self._before_step(optimizer)
            return None
        self._before_closure(optimizer)
        was_called = False

        def evaluate() -> Any:
            nonlocal was_called
            if self._each_time:
                self._before_closure(optimizer)
            loss = closure()
            if self._each_time or not was_called:
                self._before_step(optimizer)
            was_called = True
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], evaluate, *args[2:]), others

    @outside_dynamo  # type: ignore[untyped-decorator]
    def _at_end(self, optimizer: Optimizer, *_: Any) -> None:
        if not _is_within_another(optimizer):
            self._after_step(optimizer)


def _is_within_another(optimizer: Optimizer) -> bool:
    """Return whether a step of ``optimizer`` called the one that calls this, as the stack says.

    A count of steps would not know of those that raised: torch calls no hook after them.
    """
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    return sum(frame.f_code is _STEP and frame.f_locals["self"] is optimizer for frame in frames) > 1


# Hooks on all optimizers whose object is gone, to be removed later: torch may be going through them.
_gone: list[RemovableHandle] = []


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls ``method`` as long as its object is alive, and does nothing then."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*arguments)

    return outside_dynamo(call)  # type: ignore[no-any-return]


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
        return [one for part in _values(several) for one in unwrapped(part)]
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, str | torch.Tensor):
        listed = [one for part in _values(optimizer) for one in unwrapped(part)]
        if listed:
            return listed
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
    covered = {id(parameter) for parameter in parameters_of(inner)}
    return all(id(parameter) in covered for parameter in parameters_of(optimizer))


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


def unscaled(gradient: torch.Tensor, optimizer: Optimizer) -> torch.Tensor:
    """Return ``gradient`` as ``optimizer`` steps by it, zeros where it skips its step, without waiting for a device.

    GradScaler leaves both to a fused optimizer, while it steps: to divide by the scale, and to look for an overflow.
    """
    scale, overflow = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is not None:
        gradient = gradient / scale.to(gradient.device)
    return gradient if overflow is None else torch.where(overflow.to(gradient.device) > 0, 0, gradient)


def check_moves(optimizers: Sequence[Optimizer], shards: Sequence[LocalShard]) -> list[bool]:
    """Return whether each of ``optimizers`` moves one of ``shards``. Local.

    Raises:
        ValueError: none does, and there are optimizers, and elements on this rank.
    """
    moves = [any(ranges_of(shards, parameters_of(optimizer))) for optimizer in optimizers]
    if any(moves) or not optimizers or not any(shard.local.numel() for shard in shards):
        return moves
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
    # Adafactor's is None where it chooses it by itself.
    if any(rate is None or float(rate) != 0 for rate in (group.get("lr") for group in optimizer.param_groups)):
        return False
    gradients = [local_of(parameter.grad) for parameter in parameters_of(optimizer) if parameter.grad is not None]

    def fill(any_there: torch.Tensor) -> None:
        here = any(bool(gradient.any()) for gradient in gradients if on_host(gradient.device))
        there = [] if here else [gradient.any() for gradient in gradients if not on_host(gradient.device)]
        any_there[0] = here or any(map(bool, fetched(there)))

    return not bool(max_together(comm, (1,), fill)[0])
