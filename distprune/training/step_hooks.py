"""Hooks on the steps of optimizers: they are there whatever wraps the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from distprune.shards.torch_private import private

outside_dynamo = private("torch", "_disable_dynamo")
Hook = Callable[[Optimizer], None]


@final
class StepHooks:
    """Calls ``before`` each step of some optimizers, once its gradients are there, and ``after`` it.

    A step with a closure has its gradients once the closure was called: ``before_closure`` comes first, as the step
    begins, and ``before`` after the closure. ``each_time``: both as often as the optimizer calls it.
    """

    def __init__(self, before: Hook, after: Hook, before_closure: Hook, *, each_time: bool) -> None:
        self._before, self._after, self._before_closure, self._each_time = before, after, before_closure, each_time
        self.handles: list[RemovableHandle] = []

    def attach(self, optimizers: Sequence[Optimizer] | None) -> None:
        """Register the hooks; ``None``: with all optimizers."""
        if optimizers is None:
            self.handles.append(register_optimizer_step_pre_hook(self._at_begin))
            self.handles.append(register_optimizer_step_post_hook(self._at_end))
        for optimizer in optimizers or ():
            self.handles.append(optimizer.register_step_pre_hook(self._at_begin))
            self.handles.append(optimizer.register_step_post_hook(self._at_end))

    def remove(self) -> None:
        """Remove all that is in ``handles``."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @outside_dynamo  # type: ignore[untyped-decorator]
    def _at_begin(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
        if closure is None:
            self._before(optimizer)
            return None
        self._before_closure(optimizer)
        was_called = False

        def evaluate() -> Any:
            nonlocal was_called
            if self._each_time:
                self._before_closure(optimizer)
            loss = closure()
            if self._each_time or not was_called:
                self._before(optimizer)
            was_called = True
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], evaluate, *args[2:]), others

    @outside_dynamo  # type: ignore[untyped-decorator]
    def _at_end(self, optimizer: Optimizer, *_: Any) -> None:
        self._after(optimizer)
