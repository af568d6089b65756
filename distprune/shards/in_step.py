"""Passes over a sharded model in which no rank waits for one that has failed.

Such a pass is collectives: weights are gathered on the way, so a rank that left it would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from distprune.collectives.base import Communicator, as_told, out_of_step
from distprune.collectives.guarded import Guarded
from distprune.shards.fsdp2_forward import reset_forward
from distprune.shards.torch_private import private

_tree_leaves = private("torch.utils._pytree", "tree_leaves")


@contextmanager
def in_step(
    comm: Communicator, model: nn.Module, *, layers_communicate: bool = False, is_gathered: bool = False
) -> Iterator[Callable[..., Any]]:
    """Yield what runs forwards of ``model``, and backward passes in which no gradient is reduced over ranks.

    It takes a function and its arguments, and returns what that returns.

    Every rank must enter it, and run as many. What the body raises on one rank, all raise. Before FSDP gathers weights
    the ranks say that they have come to it, and one that has failed says so in place of that: a round of 64 bytes for
    each forward, for each module that FSDP gathers in it and again in its backward pass, and one at the end. If the
    model ``is_gathered`` already, one for each forward is all.

    Two kinds of errors find the others in a collective already: out of memory where FSDP gathers, and what is raised
    in a pass if ``layers_communicate`` (tensor parallelism). They are raised on their rank at once. The others raise
    when its process ends (at the group's timeout over NCCL); the command line ends them within seconds.
    """
    steps = _Steps(comm, layers_communicate)
    try:
        with ExitStack() as stack:
            for module in model.modules() if comm.size > 1 else ():
                is_sharded = isinstance(module, FSDPModule | FullyShardedDataParallel)
                if module is model or (is_sharded and not is_gathered):
                    steps.attach(module, stack)
            yield steps.run
            steps.ranks.meet()
    except BaseException as caught:
        error = as_told(caught)
        reset_forward(model)
        if steps.is_communicating:
            with out_of_step():
                raise error from (error.__context__ if error is caught else caught)
        steps.ranks.meet(error)


class _Steps:
    """Hooks around those of FSDP."""

    def __init__(self, comm: Communicator, layers_communicate: bool) -> None:
        self.ranks = Guarded(comm)
        self._layers_communicate, self._is_gathering, self._is_passing = layers_communicate, False, False

    @property
    def is_communicating(self) -> bool:
        """Whether this rank has come to a collective of the model's own, and not out of it."""
        if self.ranks.size == 1 or self.ranks.raised is not None:
            return False
        return self._is_gathering or (self._layers_communicate and self._is_passing)

    def run(self, pass_over: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._is_passing = True
        found = pass_over(*args, **kwargs)
        self._is_passing = False
        return found

    def attach(self, module: nn.Module, stack: ExitStack) -> None:
        """Register hooks that come first of all, and last of all: what FSDP does is in between."""
        for handle in (
            module.register_forward_pre_hook(self._before, prepend=True),
            module.register_forward_pre_hook(self._after),
            module.register_forward_hook(lambda _, __, output: _on_backward(output, self._before), prepend=True),
            module.register_forward_hook(lambda _, __, output: _on_backward(output, self._after)),
        ):
            stack.callback(handle.remove)

    def _before(self, *_: object) -> None:
        self.ranks.meet()
        self._is_gathering = True

    def _after(self, *_: object) -> None:
        self._is_gathering = False


def _on_backward(output: object, call: Callable[[], None]) -> None:
    """Have the backward pass ``call``, once, when it comes to ``output``."""
    is_called = False

    def once(_: torch.Tensor) -> None:
        nonlocal is_called
        if not is_called:
            is_called = True
            call()

    for part in _tree_leaves(output):
        if isinstance(part, torch.Tensor) and part.requires_grad:
            part.register_hook(once)  # type: ignore[no-untyped-call]
