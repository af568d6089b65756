"""Forwards of models that FSDP2 shards, run block by block or stopped half way.

FSDP2 does not expect that: we must tell it what stays gathered in between, and when the forward is over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from distprune.shards.fsdp2 import groups_of, state_of
from distprune.shards.torch_private import private

_FSDP2 = "torch.distributed.fsdp._fully_shard."
_TrainingState = private(_FSDP2 + "_fsdp_common", "TrainingState")


def take_roots(model: nn.Module) -> None:
    """Run FSDP2's lazy initialisation of the roots in ``model`` now, not at their first forwards.

    Then it knows all that it manages in them, also what a forward that is caught half way does not reach. Local.
    """
    if (state := state_of(model)) is not None:
        state._lazy_init()
    else:
        for child in model.children():
            take_roots(child)


def reset_forward(model: nn.Module) -> None:
    """Put all of ``model`` back to its shards, and to where no pass has begun: one was stopped, or will be.

    FSDP2 keeps what it has gathered for a forward that has not ended, and does not prepare for the backward of
    what it takes for a part of it. Gradients that are being accumulated stay, which ``FSDPModule.reset_iter_state``
    would drop. Local.
    """
    for state in _states_in(model):
        state._training_state = _TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False  # of a backward pass that was stopped
        state._modules_to_run_forward.clear()
        for group in groups_of(state):
            group._training_state = _TrainingState.IDLE
            # Ranks that were stopped in different places would gather in different orders.
            getattr(group.comm_ctx, "post_forward_order", []).clear()  # there is none before a forward
            group._post_forward_indices.clear()
            group.reshard()


@contextmanager
def kept_gathered(module: nn.Module, *, gradients: bool = False) -> Iterator[None]:
    """Let what FSDP2 gathers for forwards of ``module`` stay so from one to the next; reshard it at the end.

    With ``gradients``, passes backward may follow, for gradients of what is gathered: FSDP2 reduces none of them.

    FSDP2 must know its roots (:func:`take_roots`). Every rank must call it.
    """
    groups = _groups_in(module)
    before = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info = None  # reshard_after_forward=False
        gather(module)
        for state in _states_in(module) if gradients else ():
            state._training_state = _TrainingState.PRE_BACKWARD  # in which its hooks only cast
        yield
    finally:
        for group, mesh_info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh_info
        reset_forward(module)


def gather(module: nn.Module) -> None:
    """Gather all that FSDP2 manages within ``module``, so that a forward of it gathers nothing.

    Every rank must call it. What then raises in a forward on one rank leaves no other waiting in a collective.
    """
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()


def _states_in(model: nn.Module) -> list[Any]:
    return [state for module in model.modules() if (state := state_of(module)) is not None]


def _groups_in(model: nn.Module) -> list[Any]:
    return [group for state in _states_in(model) for group in groups_of(state)]
