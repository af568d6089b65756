"""Masks of parameters that were pruned first and sharded after."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from distprune.collectives import Group, communicator
from distprune.masks import Fsdp2Params, pruning_hooks
from distprune.pruning.agreement import Agreed
from distprune.pruning.torch_api.base import BasePruningMethod, contained, flattened
from distprune.pruning.torch_api.call import Change, Decision, Plan, prune_targets
from distprune.pruning.torch_api.targets import Target, check_binary, sharded_mask
from distprune.shards import checksum, fetched, local_of

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
    error: Exception | None = None
    pairs: list[tuple[nn.Module, str]] = []
    try:
        fsdp2 = Fsdp2Params()
        for module in model.modules():
            for hook in pruning_hooks(module).values():
                name = str(hook._tensor_name)
                released = fsdp2.find(module, name + "_orig")
                if released is not None:
                    released.release()
                if isinstance(getattr(module, name + "_orig"), DTensor) and _is_whole(getattr(module, name + "_mask")):
                    pairs.append((module, name))
    except Exception as caught:
        error = caught
    prune_targets(communicator(group), pairs, None, _Cut(), error)
    return model


class _Cut(Plan):
    """Bring every whole mask over to its parameter's layout."""

    @override
    def look(self, targets: Sequence[Target]) -> object:
        for target in targets:
            check_binary(target.label, target.whole_mask)
        return [_checksum(target.whole_mask) for target in targets]

    @override
    def decide(self, agreed: Agreed, targets: Sequence[Target]) -> Callable[[], Decision]:
        return lambda: Decision([_brought_over(target) for target in targets], {})


def _is_whole(mask: torch.Tensor) -> bool:
    return not isinstance(mask, DTensor) or all(isinstance(placement, Replicate) for placement in mask.placements)


def _checksum(mask: torch.Tensor | None) -> int:
    assert mask is not None  # it is pruned
    return 0 if mask.is_meta else int(fetched([checksum([local_of(mask)])])[0])


def _brought_over(target: Target) -> Change:
    assert target.mask is not None
    hook = next(iter(target.old_hooks.values()))
    if not isinstance(hook, BasePruningMethod):
        hook = contained(target.name, flattened(hook))
    return Change(target, sharded_mask(target, target.mask), hook)
