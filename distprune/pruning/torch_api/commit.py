"""The last round of a call on many parameters: it succeeds on all ranks, or changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from distprune.collectives.agree import max_together
from distprune.collectives.base import Communicator
from distprune.masks.reparametrized import reparametrize, snapshot
from distprune.pruning.torch_api.targets import Hook, Target
from distprune.selection.kth_value import raise_nans


@dataclass(frozen=True)
class Change:
    """A target's next mask, in the layout of its parameter, and the hook that goes with it.

    ``added``: the method that the caller appends to the hook afterwards, if that is a container which is there already.
    """

    target: Target
    mask: torch.Tensor
    hook: Hook
    added: Hook | None = None


# A change for every target, and the number of NaNs in this rank's scores, by label.
Decision = tuple[Sequence[Change], Mapping[str, int]]


def commit(comm: Communicator, decide: Callable[[], Decision]) -> Sequence[Change]:
    """Put the masks and hooks in place, and return the changes; ``decide`` is local. One round of 16 bytes.

    If any of it fails on one rank, every rank puts everything back.
    """
    undo: list[Callable[[], None]] = []
    changes: Sequence[Change] = ()
    num_nans: Mapping[str, int] = {}

    def place(any_nan: torch.Tensor) -> None:
        nonlocal changes, num_nans
        changes, num_nans = decide()
        any_nan[0] = any(num_nans.values())
        for change in changes:
            target = change.target
            undo.append(snapshot(target.module, target.managed))
            for key in target.old_hooks:
                del target.module._forward_pre_hooks[key]
            reparametrize(target.module, target.name, change.mask, target.managed)
            target.module.register_forward_pre_hook(change.hook)

    try:
        if max_together(comm, (1,), place)[0]:
            raise_nans(comm, num_nans)
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise
    return changes
