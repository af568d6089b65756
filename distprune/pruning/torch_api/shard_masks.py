"""Masks of parameters that were pruned first and sharded after."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from distprune.collectives.communicator import Group, communicator
from distprune.masks.hooks import pruning_hooks
from distprune.models.find_shards import Found
from distprune.pruning.agreement import Facts, agree_on
from distprune.pruning.torch_api.base import Change, Decision, put_in_place
from distprune.pruning.torch_api.targets import Target, check_binary, facts, find_targets
from distprune.scores.base import Score
from distprune.scores.magnitude import Magnitude
from distprune.shards.checksum import checksum
from distprune.shards.device import fetched
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.layouts import dtensor_like, local_of


def shard_masks(model: nn.Module, *, group: Group = None) -> nn.Module:
    """Cut the masks of parameters that were pruned first and sharded after, and return ``model``.

    >>> model = l1_unstructured(torch.nn.Linear(4, 4), "weight", 0.5)  # and then fully_shard(model)
    >>> sparsity(shard_masks(model))
    0.5

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
        masks = [target.whole_mask for target in targets if target.whole_mask is not None]
        sums = [checksum([local_of(mask)]) for mask in masks if not mask.is_meta]
        told = facts(targets, [int(number) for number in fetched(sums)])
        return Found(shards, [], by_default=False, has_blocks=False), told, Magnitude(), targets

    def decide() -> Decision:
        changes = []
        for target in targets:
            assert isinstance(target.original, DTensor)
            assert target.mask is not None
            changes.append(Change(target, dtensor_like(target.original, target.mask), None))
        return changes, {}

    _, targets = agree_on(comm, look)
    if targets:
        put_in_place(comm, decide)
    return model


def _with_whole_masks(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the sharded parameters whose masks are still whole; what FSDP2 left unsharded is put back."""
    fsdp2, found = Fsdp2Params(), []
    for module in model.modules():
        for hook in pruning_hooks(module).values():
            name = str(hook._tensor_name)
            fsdp2.release(module, name + "_orig")
            mask = getattr(module, name + "_mask")
            is_whole = not isinstance(mask, DTensor) or all(placement.is_replicate() for placement in mask.placements)
            if is_whole and isinstance(getattr(module, name + "_orig"), DTensor):
                found.append((module, name))
    return found
