"""What a pruning call looks at before it decides, and how it commits: all of it on all ranks, or nothing.

Nouns: a *target* is a (module, name) of the call with what is there now. Its *label* names it among
all ranks: its place in the call and its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from distprune.collectives import Communicator, together
from distprune.masks import Fsdp2Params, Managed, Snapshot, pruning_hooks, reparametrize
from distprune.selection import Pattern
from distprune.shards import (
    LocalShard,
    Matrix,
    checksum,
    cut,
    dtensor_like,
    is_flattened,
    is_held,
    is_laid_out_like,
    local_shard,
)

__all__ = [
    "Change",
    "Hook",
    "Pairs",
    "Scores",
    "Target",
    "commit",
    "described",
    "facts",
    "find_target",
    "local_part",
    "sharded_mask",
]

Pairs = Sequence[tuple[nn.Module, str]]
Scores = Mapping[tuple[nn.Module, str], torch.Tensor]
Hook = torch_prune.BasePruningMethod


@dataclass
class Target:
    """``original`` is the parameter as it is now, ``mask`` (bool, local shape) what is kept of it so far."""

    module: nn.Module
    name: str
    label: str
    original: nn.Parameter
    shard: LocalShard | None  # of the original; None where this rank holds no part of it
    whole_mask: torch.Tensor | None  # the buffer, as it is
    mask: torch.Tensor | None
    scores: torch.Tensor | None  # local shape
    managed: Managed | None
    old_hooks: dict[int, Hook]
    matrix: Matrix | None = None  # how the parameter is one, for a method that cares

    @property
    def ranked(self) -> LocalShard | None:
        """What elements are ranked by: the scores, or the original's values."""
        if self.shard is None or self.scores is None:
            return self.shard
        scores = self.scores if self.scores.is_floating_point() else self.scores.to(torch.float64)
        return dataclasses.replace(self.shard, local=scores)


def find_target(
    fsdp2: Fsdp2Params, module: nn.Module, name: str, index: int, importance_scores: torch.Tensor | None
) -> Target:
    """Return what is at ``name`` in ``module``; what FSDP2 left unsharded is put back. No communication.

    Raises:
        AttributeError, TypeError: ``name`` is no attribute, or no parameter.
        AssertionError: scores of another shape; more than one hook on the parameter.
        NotImplementedError, ValueError: layouts this library cannot work in.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, not {type(module).__name__}")
    hooks = pruning_hooks(module, name)
    if len(hooks) > 1:
        raise AssertionError(
            f"Avoid adding multiple pruning hooks to the same tensor {name} of module {module}. Use a PruningContainer."
        )
    managed = fsdp2.find(module, name + "_orig" if hooks else name)
    if managed is not None:
        if managed.is_shared:
            raise NotImplementedError(
                f"FSDP2 shares parameter {name!r} of {type(module).__name__} between several modules, and prunes it in "
                "all of them or in none; prune it in place with distprune.prune_model, or untie it before fully_shard"
            )
        managed.release()
    if not hooks and name not in module._parameters:
        getattr(module, name)  # AttributeError, if there is no such thing at all
        raise TypeError(
            f"{name!r} of {type(module).__name__} is no torch.nn.Parameter of it; FSDP1 without use_orig_params, and "
            "torch.nn.utils.parametrize, hide parameters: prune those in place with distprune.prune_model"
        )
    original = module._parameters[name + "_orig" if hooks else name]
    if original is None:
        raise TypeError(f"parameter {name!r} of {type(module).__name__} is None")
    if is_flattened(original):
        raise NotImplementedError(
            f"parameter {name!r} of {type(module).__name__} is part of a flat parameter of FullyShardedDataParallel "
            "(FSDP1), which has no room for a mask; prune it in place with distprune.prune_model"
        )
    whole_mask = cast(torch.Tensor, getattr(module, name + "_mask")) if hooks else None
    shard = local_shard(f"{index}.{name}", original) if is_held(original) else None
    if importance_scores is not None and importance_scores.shape != original.shape:
        raise AssertionError(
            f"importance_scores should have the same shape as parameter {name} of {module}, got "
            f"{importance_scores.shape} vs {original.shape}"
        )
    return Target(
        module,
        name,
        f"{index}.{name}",
        original,
        shard,
        whole_mask,
        None if whole_mask is None else _is_one(local_part(whole_mask, original, shard, "mask")),
        None if importance_scores is None else local_part(importance_scores, original, shard, "importance_scores"),
        managed,
        hooks,
    )


def local_part(tensor: torch.Tensor, parameter: torch.Tensor, shard: LocalShard | None, what: str) -> torch.Tensor:
    """Return the local part of ``tensor``, a whole or a DTensor of the parameter's shape. No communication.

    Raises:
        ValueError: it is laid out in a way that would take communication to bring over.
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        if isinstance(parameter, DTensor) and is_laid_out_like(tensor, parameter):
            local = tensor.to_local()
            return local if shard is None else local.reshape(shard.local.shape)
        if not all(isinstance(placement, Replicate) for placement in tensor.placements):
            layout = (
                f"a DTensor with {parameter.placements} on {parameter.device_mesh}"
                if isinstance(parameter, DTensor)
                else "plain"
            )
            raise ValueError(
                f"the {what} is a DTensor with {tensor.placements} on {tensor.device_mesh}, its parameter is {layout}; "
                "redistribute it to the parameter's layout, or pass the whole of it on every rank"
            )
        tensor = tensor.to_local()
    if shard is None:
        return tensor.new_empty(0)
    return cut(tensor, shard.geometry).to(shard.local.device)


def described(method: object) -> list[Any]:
    """Return a method's class and arguments as ranks compare them; objects without a plain value by their type."""
    return [type(method).__name__, {name: _plain(value) for name, value in sorted(vars(method).items())}]


def _plain(value: object) -> object:
    if isinstance(value, DTensor):
        return ["DTensor", list(value.shape), str(value.dtype), str(value.placements)]
    if isinstance(value, torch.Tensor):
        return ["Tensor", list(value.shape), str(value.dtype), checksum(value)]
    if value is None or isinstance(value, bool | int | float | str | Pattern):
        return repr(value)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return type(value).__name__


def _is_one(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype is torch.bool else mask == 1


def facts(comm: Communicator, targets: Sequence[Target], method: object, scores: Scores | None) -> dict[str, object]:
    """Return what all ranks must say alike of a call; a lone process need not say it."""
    if comm.size == 1:
        return {}
    return {
        "method": described(method),
        "pruned before by": [[type(hook).__name__ for hook in target.old_hooks.values()] for target in targets],
        "importance scores": [_plain((scores or {}).get((target.module, target.name))) for target in targets],
    }


@dataclass(frozen=True)
class Change:
    """A target's next mask, in the layout of its parameter, and the hook that goes with it.

    ``added``: what the hook, a container that is there already, takes in.
    """

    target: Target
    mask: torch.Tensor
    hook: Hook
    added: Hook | None = None


def commit(comm: Communicator, changes: Sequence[Change]) -> None:
    """Put the masks and hooks in place; if that fails on one rank, every rank puts everything back.

    Every rank must call it: one round of 72 bytes.
    """
    snapshots = [Snapshot(change.target.module, change.target.managed) for change in changes]
    contained = [(change.hook, cast(Any, change.hook)._pruning_methods) for change in changes if change.added]
    try:
        with together(comm):
            for change in changes:
                _place(change)
    except Exception:
        for snapshot in reversed(snapshots):
            snapshot.put_back()
        for container, methods in contained:
            cast(Any, container)._pruning_methods = methods
        raise


def _place(change: Change) -> None:
    target = change.target
    if change.added is not None:
        cast(Any, change.hook).add_pruning_method(change.added)
    for key in target.old_hooks:
        del target.module._forward_pre_hooks[key]
    reparametrize(target.module, target.name, change.mask, target.managed)
    target.module.register_forward_pre_hook(change.hook)


def sharded_mask(target: Target, local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` (bool) as a mask in the layout of the target's parameter: a DTensor where that is one."""
    original = target.original
    return dtensor_like(original, local) if isinstance(original, DTensor) else local.to(original.dtype)
