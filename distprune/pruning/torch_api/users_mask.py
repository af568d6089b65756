"""Masks that a user's own method computes, on plain parameters as PyTorch has it, and on shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from distprune.pruning.torch_api.targets import Hook, Target, check_binary
from distprune.shards.layouts import dtensor_like, is_laid_out_like, local_of
from distprune.shards.torch_private import TorchDispatchMode, private

_no_redistribution = private("torch.distributed.tensor._utils", "ExplicitRedistributionContext")


def pruning_type(method: torch_prune.BasePruningMethod) -> str:
    return str(getattr(method, "PRUNING_TYPE", None))  # needed when its mask is combined with another


def check_type(method: torch_prune.BasePruningMethod) -> None:
    """Raise unless ``method`` says how its masks combine with earlier ones, as ``PruningContainer`` does.

    Raises:
        ValueError: an unknown ``PRUNING_TYPE``.
        AttributeError: a structured method without ``dim``.
    """
    kind = pruning_type(method)
    if kind not in ("unstructured", "structured", "global"):
        raise ValueError(f"Unrecognized PRUNING_TYPE {kind}")
    if kind == "structured" and "dim" not in dir(method):
        raise AttributeError('Pruning methods of PRUNING_TYPE "structured" need to have the attribute `dim` defined.')


def masks_by_users(targets: Sequence[Target], methods: Sequence[Hook], *, over_all: bool) -> list[torch.Tensor]:
    """Return the masks that users' methods compute, in the targets' layouts; ``over_all``: plain ones as one vector.

    No communication.

    Raises:
        ValueError: a mask of another shape, or on shards of other values than 0 and 1.
        NotImplementedError: a method needs more than its shard.
    """
    if over_all and not any(isinstance(target.original, DTensor) for target in targets):
        return _over_all(targets, methods[0])
    return [_of_one(target, method) for target, method in zip(targets, methods, strict=True)]


def _of_one(target: Target, method: Hook) -> torch.Tensor:
    ranked = _ranked(target)
    if isinstance(target.original, DTensor):
        kept = target.mask if target.mask is not None else torch.ones_like(target.original.to_local(), dtype=torch.bool)
        sharded = dtensor_like(target.original, kept.to(target.original.dtype))
        mask = mask_by_user(method, ranked.detach(), sharded, again=True)
        check_binary(target.label, mask)
        local = local_of(mask)
        return dtensor_like(target.original, kept.reshape(local.shape) & local.bool())
    default = torch.ones_like(target.original) if target.whole_mask is None else target.whole_mask
    mask = mask_by_user(method, ranked, default, again=target.whole_mask is not None)
    if not isinstance(mask, torch.Tensor) or mask.shape != target.original.shape:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else None
        raise ValueError(
            f"the mask computed for {target.label!r} has shape {shape}, not {tuple(target.original.shape)}"
        )
    return mask


def _ranked(target: Target) -> torch.Tensor:
    """Return what a method ranks elements by: the importance scores, or the parameter's values as they are used."""
    if target.scores is None:
        return target.values
    return dtensor_like(target.original, target.scores) if isinstance(target.original, DTensor) else target.scores


def _over_all(targets: Sequence[Target], method: Hook) -> list[torch.Tensor]:
    """Show a user's method all plain parameters as one vector, as ``torch.nn.utils.prune`` does."""
    ranked = torch.cat([_ranked(target).reshape(-1) for target in targets])
    masks = [torch.ones_like(t.original) if t.whole_mask is None else t.whole_mask for t in targets]
    default = torch.cat([mask.reshape(-1) for mask in masks])
    whole = mask_by_user(method, ranked, default, again=True)
    pieces = torch.split(whole, [mask.numel() for mask in masks])
    return [piece.view(mask.shape).clone() for piece, mask in zip(pieces, masks, strict=True)]


def mask_by_user(
    method: torch_prune.BasePruningMethod, t: torch.Tensor, default_mask: torch.Tensor, *, again: bool
) -> torch.Tensor:
    """Return the mask a user's method computes, in the layout of ``t``. No communication.

    Plain tensors: as PyTorch calls it; ``again``: on what ``default_mask`` leaves. DTensors: on all of
    the shard at once, which is the same for a method that works elementwise.

    Raises:
        NotImplementedError: the method needs more than its shard.
    """
    if isinstance(t, DTensor):
        return _on_shards(method, t, cast(DTensor, default_mask))
    caller: Any = torch_prune.PruningContainer(method) if again else method
    # The container writes into the mask that it gets.
    mask: torch.Tensor = caller.compute_mask(t, default_mask=default_mask.clone())
    return mask


class _NoScalars(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to turn a DTensor into a number: what a rank would get is its own part's."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_number = func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor)
        if is_number and not all(isinstance(placement, Replicate) for placement in args[0].placements):
            raise RuntimeError("item() of a DTensor is a number of this rank's shard alone")
        return func(*args, **(kwargs or {}))


def _on_shards(method: torch_prune.BasePruningMethod, t: DTensor, default_mask: DTensor) -> torch.Tensor:
    name = type(method).__name__
    advice = (
        f"{name}.compute_mask must work elementwise on a sharded parameter, for example "
        "`return default_mask * (t.abs() >= threshold)`; to rank elements, pass importance_scores to "
        "distprune.l1_unstructured or global_unstructured instead"
    )
    try:
        # DTensor would gather the parameter without a word; that is not what anybody wants here.
        with _no_redistribution(strict=True), _NoScalars(), torch.no_grad():  # type: ignore[no-untyped-call]
            mask: torch.Tensor = cast(Any, method).compute_mask(t, default_mask=default_mask)
    except (ValueError, TypeError, AssertionError):
        raise
    except Exception as error:
        raise NotImplementedError(f"{advice} ({type(error).__name__}: {error})") from error
    if not is_laid_out_like(mask, t) or mask.shape != t.shape:
        got = f"{type(mask).__name__} of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)
        raise NotImplementedError(f"{advice}; it returned a {got}, not a DTensor in the parameter's layout")
    return mask
