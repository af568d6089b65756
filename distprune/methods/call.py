"""One pruning call on many parameters: look, agree, decide, commit. Every method's ``apply`` ends here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.utils.prune as torch_prune
from torch.distributed.tensor import DTensor, Replicate

from distprune.collectives import Communicator, Roster, agree
from distprune.masks import Fsdp2Params, product
from distprune.methods.agreement import agree_on, settle_owners
from distprune.methods.base import (
    BasePruningMethod,
    Part,
    PruningContainer,
    Selecting,
    check_type,
    mask_by_user,
    pruning_type,
)
from distprune.methods.decide import Scope, check_replicas
from distprune.methods.reparametrize import (
    Change,
    Hook,
    Pairs,
    Scores,
    Target,
    commit,
    facts,
    find_target,
    sharded_mask,
)
from distprune.shards import LocalShard, checksum, dtensor_like, local_of

__all__ = ["prune_targets", "shard_targets"]


def prune_targets(
    comm: Communicator,
    pairs: Pairs,
    make_method: Callable[[], Hook],
    scores: Scores | None,
    *,
    scope: Scope = "tensor",
    hook_of_mask: Callable[[torch.Tensor], Hook] | None = None,
    error: Exception | None = None,
) -> list[Hook]:
    """Prune all of ``pairs`` by one method each, made anew, and return their hooks. Every rank must call it.

    ``scope``: whether each competes for itself, or all of them together. ``hook_of_mask``: makes what is
    registered, from the mask that was decided, in place of the method. ``error``: what the caller found
    wrong already, raised on all ranks.
    """
    targets: list[Target] = []
    methods: list[Hook] = []
    said: dict[str, object] = {}
    try:
        fsdp2 = Fsdp2Params()
        for index, (module, name) in enumerate(pairs):
            given = (scores or {}).get((module, name))
            targets.append(find_target(fsdp2, module, name, index, given))
            methods.append(make_method())
        _check_distinct(targets)
        _check_methods(targets, methods, scope)
        if methods:
            said = facts(comm, targets, methods[0], scores)
    except Exception as caught:
        error = caught
    shards = [shard for target in targets if (shard := target.ranked) is not None]
    roster, _ = agree_on(comm, shards if error is None else [], said, error)
    if not targets:
        return []
    settled = {shard.name: shard for shard in settle_owners(comm, shards, roster)}
    method = methods[0]
    if isinstance(method, Selecting) and not method.is_overridden:
        masks = _selected(comm, roster, targets, settled, method, scope)
    else:
        masks = _computed(comm, roster, targets, settled, methods, scope)
    hooks = methods if hook_of_mask is None else [hook_of_mask(mask) for mask in masks]
    changes = [_change(target, mask, hook) for target, mask, hook in zip(targets, masks, hooks, strict=True)]
    commit(comm, changes)
    return [change.hook for change in changes]


def shard_targets(comm: Communicator, pairs: Pairs) -> None:
    """Bring every whole mask of a sharded parameter over to the parameter's layout. Every rank must call it."""
    changes: list[Change] = []
    said: dict[str, object] = {}
    error: Exception | None = None
    try:
        fsdp2 = Fsdp2Params()
        targets = []
        for index, (module, name) in enumerate(pairs):
            released = fsdp2.find(module, name + "_orig")
            if released is not None:
                released.release()
            is_sharded = isinstance(getattr(module, name + "_orig"), DTensor)
            if is_sharded and _is_whole(getattr(module, name + "_mask")):
                targets.append(find_target(fsdp2, module, name, index, None))
        for target in targets:
            _check_binary(target.label, target.whole_mask)
            changes.append(_brought_over(target))
        if comm.size > 1:
            said = {target.label: _plain_mask(target) for target in targets}
    except Exception as caught:
        error = caught
    agree(comm, said, error)
    commit(comm, changes)


def _is_whole(mask: torch.Tensor) -> bool:
    return not isinstance(mask, DTensor) or all(isinstance(placement, Replicate) for placement in mask.placements)


def _plain_mask(target: Target) -> int:
    assert target.whole_mask is not None
    return 0 if target.whole_mask.is_meta else checksum(local_of(target.whole_mask))


def _brought_over(target: Target) -> Change:
    assert target.mask is not None
    hook = next(iter(target.old_hooks.values()))
    if not isinstance(hook, BasePruningMethod):
        hook = _contained(target.name, _flattened(hook))
    return Change(target, sharded_mask(target, target.mask), hook)


def _check_binary(label: str, mask: torch.Tensor | None) -> None:
    if mask is not None and not mask.is_meta and not _is_binary(mask):
        raise ValueError(f"the mask of sharded parameter {label!r} holds values other than 0 and 1")


def _is_binary(mask: torch.Tensor) -> bool:
    local = local_of(mask)
    return local.dtype is torch.bool or bool(((local == 0) | (local == 1)).all())


def _check_distinct(targets: Sequence[Target]) -> None:
    seen: set[tuple[int, str]] = set()
    for target in targets:
        key = id(target.module), target.name
        if key in seen:
            raise ValueError(f"parameter {target.name!r} of {type(target.module).__name__} is in the call twice")
        seen.add(key)


def _check_methods(targets: Sequence[Target], methods: Sequence[Hook], scope: Scope) -> None:
    for target, method in zip(targets, methods, strict=True):
        method._tensor_name = target.name
        if scope == "global" and pruning_type(method) != "unstructured":
            raise TypeError(
                'Only "unstructured" PRUNING_TYPE supported for the `pruning_method`. Found method '
                f"{type(method).__name__} of type {pruning_type(method)}"
            )
        if target.old_hooks:
            check_type(method)
        if isinstance(method, Selecting):
            method.check(target.original.shape)
            target.matrix = method.matrix_of(target.module, target.name, target.original.shape)
        standard = (BasePruningMethod.apply_mask, torch_prune.BasePruningMethod.apply_mask)
        overrides = type(method).apply_mask not in standard
        if overrides and target.managed is not None:
            raise NotImplementedError(
                f"{type(method).__name__}.apply_mask is its own; under FSDP2 the mask is multiplied into the shard "
                "before it is gathered, so only the standard product works there"
            )


def _selected(
    comm: Communicator,
    roster: Roster,
    targets: Sequence[Target],
    settled: dict[str, LocalShard],
    method: Selecting,
    scope: Scope,
) -> list[torch.Tensor]:
    """Decide by a method of ours, on all shards at once."""
    held = [(i, target) for i, target in enumerate(targets) if target.label in settled]
    parts = [_part(target, settled[target.label], pruning_type(method), i) for i, target in held]
    kept = dict(zip((target.label for _, target in held), method.local_masks(comm, roster, parts, scope), strict=True))
    return [_on_top(target, kept.get(target.label), pruning_type(method)) for target in targets]


def _part(target: Target, shard: LocalShard, kind: str, index: int) -> Part:
    shard = dataclasses.replace(shard, matrix=target.matrix)
    if kind == "global":
        return Part(shard, None, True, index)
    if kind == "structured" and target.whole_mask is not None and not _is_binary(target.whole_mask):
        # Masks need not be binary on plain modules: channels rank by the product, and are left unless all is 0.
        if target.scores is None:
            shard = dataclasses.replace(shard, local=getattr(target.module, target.name).detach())
        return Part(shard, target.whole_mask != 0, True, index)
    return Part(shard, target.mask, target.scores is not None, index)


def _on_top(target: Target, keep: torch.Tensor | None, kind: str) -> torch.Tensor:
    """Return the target's next mask: the one it has, without what is not in ``keep`` (bool, local shape)."""
    if keep is None:  # this rank holds no part of it
        assert isinstance(target.original, DTensor)
        return dtensor_like(target.original, torch.empty(0, dtype=torch.bool))
    if target.mask is None:
        return sharded_mask(target, keep)
    if isinstance(target.original, DTensor):
        return dtensor_like(target.original, target.mask & keep)
    assert target.whole_mask is not None
    if kind == "unstructured":
        keep = keep | ~target.mask  # what is neither 0 nor 1 was not up for selection
    return target.whole_mask.detach() * keep.to(target.whole_mask.dtype)


def _computed(
    comm: Communicator,
    roster: Roster,
    targets: Sequence[Target],
    settled: dict[str, LocalShard],
    methods: Sequence[Hook],
    scope: Scope,
) -> list[torch.Tensor]:
    """Let the user's own method compute the masks, and see that replicas agree on them."""
    error: Exception | None = None
    masks: list[torch.Tensor] = []
    try:
        if scope == "global" and not any(isinstance(target.original, DTensor) for target in targets):
            masks = _over_all(targets, methods[0])
        else:
            masks = [_of_one(target, method) for target, method in zip(targets, methods, strict=True)]
    except Exception as caught:
        error = caught
    agree(comm, {}, error)
    if comm.size > 1:
        shards = [
            dataclasses.replace(settled[target.label], local=local_of(mask).reshape(settled[target.label].local.shape))
            for target, mask in zip(targets, masks, strict=True)
            if target.label in settled
        ]
        check_replicas(comm, roster, shards)
    return masks


def _of_one(target: Target, method: Hook) -> torch.Tensor:
    ranked = getattr(target.module, target.name) if target.scores is None else _whole_scores(target)
    if not isinstance(target.original, DTensor):
        default = torch.ones_like(target.original) if target.whole_mask is None else target.whole_mask.detach().clone()
        again = target.whole_mask is not None
        return _checked(target, mask_by_user(method, ranked, default, again=again))
    kept = target.mask if target.mask is not None else torch.ones_like(target.original.to_local(), dtype=torch.bool)
    default = dtensor_like(target.original, kept.to(target.original.dtype))
    mask = _checked(target, mask_by_user(method, ranked.detach(), default, again=True))
    _check_binary(target.label, mask)
    local = local_of(mask)
    return dtensor_like(target.original, kept.reshape(local.shape) & local.bool())


def _checked(target: Target, mask: Any) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.shape != target.original.shape:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else None
        raise ValueError(
            f"the mask computed for {target.label!r} has shape {shape}, not {tuple(target.original.shape)}"
        )
    return mask


def _whole_scores(target: Target) -> torch.Tensor:
    assert target.scores is not None
    return dtensor_like(target.original, target.scores) if isinstance(target.original, DTensor) else target.scores


def _over_all(targets: Sequence[Target], method: Hook) -> list[torch.Tensor]:
    """Show a user's method all plain parameters as one vector, as ``torch.nn.utils.prune`` does."""
    ranked = torch.cat([(_product_or_parameter(t) if t.scores is None else t.scores).reshape(-1) for t in targets])
    masks = [torch.ones_like(t.original) if t.whole_mask is None else t.whole_mask for t in targets]
    default = torch.cat([mask.reshape(-1) for mask in masks])
    whole = mask_by_user(method, ranked, default, again=True)
    pieces = torch.split(whole, [mask.numel() for mask in masks])
    return [piece.view(mask.shape).clone() for piece, mask in zip(pieces, masks, strict=True)]


def _product_or_parameter(target: Target) -> torch.Tensor:
    return product(target.module, target.name) if target.old_hooks else target.original


def _change(target: Target, mask: torch.Tensor, method: Hook) -> Change:
    """Say which hook goes with ``mask``: the method itself, or a container of it and what was there before."""
    method._tensor_name = target.name
    old = next(iter(target.old_hooks.values()), None)
    if old is None and isinstance(method, BasePruningMethod):
        return Change(target, mask, method)
    if isinstance(old, PruningContainer):
        return Change(target, mask, old, added=method)
    # A method of PyTorch's own goes into a container of ours, which knows the layouts.
    return Change(target, mask, _contained(target.name, [*_flattened(old), method]))


def _flattened(hook: Hook | None) -> list[Hook]:
    if hook is None:
        return []
    return list(hook) if isinstance(hook, torch_prune.PruningContainer) else [hook]


def _contained(name: str, methods: Sequence[Hook]) -> PruningContainer:
    container = PruningContainer()
    container._tensor_name = name
    for method in methods:
        container.add_pruning_method(method)
    return container
