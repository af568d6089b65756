"""State dicts with the keys of a model that was never pruned: written for others to load, and taken back.

Nouns: a reparametrized ``name`` has two *split* keys in a state dict, ``name_orig`` and ``name_mask``. Its *plain* key
is ``name`` alone. Plain values have the bits that ``hold_zeros`` reads: +0.0 where the mask is 0, and a kept weight
that happens to be zero is written as -0.0, which is the same number. So the mask can be read back from them.

All saving for others comes together in ``PreTrainedModel.save_pretrained``: the user's call, the Trainer's,
Accelerate's. It asks the model for its state dict or is given one. A pruned module cannot know for whom a state dict
is, nor which model it is part of. So the first time that a module is reparametrized, the few methods of ``_SAVERS``
that are imported by then are replaced by ones that do the same with plain keys. Models without pruned modules do not
notice. Saving that is meant to be resumed from (``Accelerator.save_state``, sharded checkpoints) keeps the original and
the mask.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.masks.hooks import pruning_hooks
from distprune.masks.in_place import write_signed_zeros
from distprune.models.find_shards import check_model
from distprune.shards.layouts import dtensor_like, is_laid_out_like, local_of, local_part, local_shard
from distprune.shards.local_shard import bits_of

keys_are_plain: ContextVar[bool] = ContextVar("plain_keys", default=False)
# By module, class and method.
_SAVERS = (
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("accelerate.accelerator", "Accelerator", "save_model"),
)


@contextmanager
def plain_keys() -> Iterator[None]:
    """Let modules that are pruned by this library write plain keys into state dicts made within, by this thread."""
    token = keys_are_plain.set(True)
    try:
        yield
    finally:
        keys_are_plain.reset(token)


def dense_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()`` as if the model had not been reparametrized. No communication, no gather.

    >>> layer = torch.nn.Linear(4, 4)
    >>> _ = l1_unstructured(layer, "weight", 0.5)
    >>> [*layer.state_dict()], [*dense_state_dict(layer)]
    (['bias', 'weight_orig', 'weight_mask'], ['bias', 'weight'])

    ``weight`` stands in the place of ``weight_orig`` and ``weight_mask``: their product, detached, in the parameter's
    layout (a DTensor where that is one). Everything else is what ``model.state_dict()`` has, and is not copied. So it
    loads into a model that was never pruned, also from ``torch.distributed.checkpoint`` at another number of ranks.
    Where a mask is 0 the value is +0.0; a kept weight that is zero is -0.0.
    """
    check_model(model)
    return joined(model, model.state_dict())


def joined(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a ``state_dict`` of ``model`` with plain keys; also if it has been gathered. Local."""
    found = copy.copy(state_dict)  # with its _metadata
    names = {hook._tensor_name for module in model.modules() for hook in pruning_hooks(module).values()}
    for key in state_dict:
        plain = key.removesuffix("_orig")
        if plain != key and plain.rpartition(".")[2] in names and f"{plain}_mask" in state_dict:
            join_keys(found, plain)
    return found


def join_keys(state_dict: MutableMapping[str, Any], key: str) -> None:
    """Put the plain ``key`` in the place of the two that it is split into. Local."""
    state_dict[key] = _masked(state_dict.pop(f"{key}_orig"), state_dict.pop(f"{key}_mask"))


@torch.no_grad()
def _masked(original: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the product, in the layout of ``original``, with the signs of zeros as the module says."""
    original = original.detach()
    if original.is_meta:
        return torch.empty_like(original)
    keep = local_mask(original, mask) if isinstance(original, DTensor) else local_of(mask)
    values = local_of(original)
    has_signs = _has_signed_zeros(values)
    values = values.clone() if has_signs and keep.dtype is torch.bool else values * keep.to(values)
    if has_signs:
        write_signed_zeros(values, (keep != 0).to(values.device), where=False)
    return dtensor_like(original, values) if isinstance(original, DTensor) else values


def _has_signed_zeros(values: torch.Tensor) -> bool:
    """Return whether a zero among ``values`` can say by its sign that it is kept."""
    return (values.is_floating_point() or values.is_complex()) and values.dtype is not torch.complex128


def local_mask(parameter: DTensor, mask: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``mask``, a whole or a DTensor like ``parameter``."""
    part = local_part(mask, parameter, local_shard("mask", parameter), "mask")
    return part.reshape(parameter.to_local().shape)


def take_plain_key(
    module: nn.Module, name: str, state_dict: MutableMapping[str, Any], prefix: str, errors: list[str]
) -> None:
    """Let a plain ``name`` that is about to be loaded be the original's new values, and keep the mask. Local.

    Only if its zeros are those of the mask. If the mask is 0 at other values, they would be lost; if it is not 0 at
    +0.0, that weight was pruned and would come back. Then the error goes into ``errors``, which ``load_state_dict``
    raises, with ``strict=False`` too.
    """
    key = prefix + name
    if key not in state_dict or f"{key}_orig" in state_dict:
        return
    values, mask = state_dict.pop(key), module.get_buffer(f"{name}_mask")
    if problem := _disagreement(values, module.get_parameter(f"{name}_orig"), mask):
        errors.append(
            f"{key!r} does not fit the mask of the pruned module: {problem}. Load it before pruning, or give the "
            f"module that mask first: distprune.custom_from_mask(module, {name!r}, {name} != 0)."
        )
        return
    state_dict[f"{key}_orig"], state_dict[f"{key}_mask"] = values, mask


def _disagreement(values: torch.Tensor, original: torch.Tensor, mask: torch.Tensor) -> str:
    """Return how zeros of the plain ``values`` differ from ``mask`` on this rank; empty: they do not."""
    if original.shape != values.shape:
        return f"it has shape {tuple(values.shape)}, not {tuple(original.shape)}"
    if isinstance(original, DTensor) and not is_laid_out_like(values, original):
        return "it is no DTensor in the parameter's layout"
    if values.is_meta or mask.is_meta:
        return "one of them has no values yet (meta)"
    local = local_of(values)
    held = (local_mask(original, mask) if isinstance(original, DTensor) else mask).to(local.device)
    if held.dtype is not torch.bool and not bool(((held == 0) | (held == 1)).all()):
        return "the mask holds values other than 0 and 1"
    kept = held != 0
    num_lost = int(((local != 0) & ~kept).sum())
    num_more = int(((bits_of(local) == 0) & kept).sum()) if _has_signed_zeros(local) else 0
    if num_lost or num_more:
        return f"it is not 0 at {num_lost} places where the mask is, and 0 at {num_more} that the mask keeps"
    return ""


def watch_savers() -> None:
    """Let what is imported of transformers and Accelerate save plain keys of reparametrized models. Local."""
    for module, name, method in _SAVERS:
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None and not hasattr(vars(owner)[method], "_saves_plain_keys"):
            setattr(owner, method, _saving_plain_keys(vars(owner)[method]))


def _saving_plain_keys(save: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(save)

    @functools.wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        model: nn.Module = given.get("model", given["self"])
        if given.get("distributed_checkpoint") or not any(pruning_hooks(module) for module in model.modules()):
            return save(*args, **kwargs)
        if given.get("state_dict") is not None:
            given["state_dict"] = joined(model, given["state_dict"])
        with plain_keys():
            return save(*bound.args, **bound.kwargs)

    saving._saves_plain_keys = True  # type: ignore[attr-defined]
    return saving
