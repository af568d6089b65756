"""Masks of parameters that were pruned first and sharded after."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from distprune.collectives import Group, communicator
from distprune.masks import pruning_hooks
from distprune.models import Found
from distprune.pruning.agreement import Facts, agree_on
from distprune.pruning.torch_api.base import BasePruningMethod, contained, flattened, put_in_place
from distprune.pruning.torch_api.commit import Change, Decision
from distprune.pruning.torch_api.targets import Target, check_binary, facts, find_targets
from distprune.scores import Magnitude, Score
from distprune.shards import Fsdp2Params, checksum, dtensor_like, fetched, local_of

__all__ = ["shard_masks"]


def shard_masks(model: nn.Module, *, group: Group = None) -> nn.Module:
    """Cut the masks of parameters that were pruned first and sharded after, and return ``model``.

    Call it after ``fully_shard`` or ``parallelize_module`` on a pruned model, by distprune or by
    ``torch.nn.utils.prune``: every rank keeps its own part of each mask, one byte an element, and the
    rest of this module goes on from there. (Pruning such a parameter again does the same for it.) Masks
    that are in place already are left alone. Every rank of ``group`` must call it; two rounds.

    Raises:
        ValueError: on every rank: masks that differ between ranks, or hold other values than 0 and 1.
    """
    comm = communicator(group)

    def look() -> tuple[Found, Facts, Score, list[Target]]:
        targets = find_targets(_with_whole_masks(model))
        for target in targets:
            check_binary(target.label, target.whole_mask)
        shards = [target.shard for target in targets if target.shard is not None]
        own_facts = facts(comm, targets, [_checksum(target.whole_mask) for target in targets])
        return Found(shards, [], by_default=False, has_blocks=False), own_facts, Magnitude(), targets

    _, targets = agree_on(comm, look)
    if targets:
        put_in_place(comm, lambda: Decision([_brought_over(target) for target in targets], {}))
    return model


def _with_whole_masks(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the sharded parameters whose masks are still whole; what FSDP2 left unsharded is put back."""
    fsdp2, found = Fsdp2Params(), []
    for module in model.modules():
        for hook in pruning_hooks(module).values():
            name = str(hook._tensor_name)
            fsdp2.release(module, name + "_orig")
            if isinstance(getattr(module, name + "_orig"), DTensor) and _is_whole(getattr(module, name + "_mask")):
                found.append((module, name))
    return found


def _is_whole(mask: torch.Tensor) -> bool:
    return not isinstance(mask, DTensor) or all(isinstance(placement, Replicate) for placement in mask.placements)


def _checksum(mask: torch.Tensor | None) -> int:
    assert mask is not None  # it is pruned
    return 0 if mask.is_meta else int(fetched([checksum([local_of(mask)])])[0])


def _brought_over(target: Target) -> Change:
    assert isinstance(target.original, DTensor)
    assert target.mask is not None
    hook = next(iter(target.old_hooks.values()))
    if not isinstance(hook, BasePruningMethod):
        hook = contained(target.name, flattened(hook))
    return Change(target, dtensor_like(target.original, target.mask), hook)
