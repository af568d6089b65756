"""Adapters merged into a pruned base: PEFT merges, and zeros become zero again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.masks.in_place import zero_where_pruned
from distprune.masks.reparametrized import mask_of, reparametrize, undo_reparametrization
from distprune.models.find_shards import check_model, find_shards
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.layouts import local_of

_ADAPTED = "*.base_layer.*"  # how PEFT names what an adapter adapts
_WRAPPED = ("original_module", "modules_to_save")  # and a module that it trains a copy of, and the copies


def merge_adapters(model: nn.Module, **options: Any) -> Any:
    """Merge the adapters of a PEFT ``model`` into its base, keep the zeros of the base, and return it.

    >>> merged = merge_adapters(peft_model)  # doctest: +SKIP

    It is PEFT's ``merge_and_unload``, with its ``options`` (``safe_merge``, ``adapter_names``). An adapter's update is
    dense, so that call alone leaves no zeros in a base that was pruned in place. Here the weights of adapted layers
    that were zero before are zero afterwards, also if the merge fails. So are those of ``modules_to_save``, of which
    PEFT trains copies. Masks of ``torch.nn.utils.prune``'s kind stay; PEFT's own call loses its whole update there,
    because a ``weight`` that is computed keeps nothing of what is written into it. The update where weights are zero is
    lost: fine-tune with the merged weights' zeros held (:func:`distprune.hold_zeros`), or measure what it costs.

    Plain models, and DTensors (FSDP2, tensor parallel) as far as PEFT merges them: every rank must call it, since PEFT
    multiplies DTensors. Nothing else is communicated. It takes a byte a weight of the adapted layers.

    Raises:
        TypeError: ``model`` is no PEFT model.
        ValueError: nothing in ``model`` is adapted.
        NotImplementedError: nothing changed: FSDP1, whose parameters PEFT does not find; ``safe_merge`` of DTensors,
            which PEFT's assignment to ``data`` does not reach.
    """
    check_model(model)
    merge = getattr(model, "merge_and_unload", None)
    if merge is None:
        raise TypeError(f"a {type(model).__name__} has no merge_and_unload(): pass what peft.get_peft_model returned")
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    masks: list[tuple[nn.Module, str, torch.Tensor]] = []
    for shard in find_shards(model, _ADAPTED).shards:
        if shard.tensor is None:
            raise NotImplementedError(f"{shard.name!r} is FSDP1's; merge before sharding, or shard with fully_shard")
        if isinstance(shard.tensor, DTensor) and options.get("safe_merge"):
            raise NotImplementedError(f"PEFT loses a safe_merge into DTensors such as {shard.name!r}: merge without it")
        if shard.module is not None and mask_of(shard) is not None:
            masks.append((shard.module, shard.attribute, shard.module.get_buffer(f"{shard.attribute}_mask")))
        elif len(shard.shape) > 1:  # biases begin as zeros, and learn
            before.append((shard.tensor, shard.local != 0))
    for wrapper in [module for module in model.modules() if module._modules.keys() >= {*_WRAPPED}]:
        original, copies = (wrapper.get_submodule(name) for name in _WRAPPED)
        for name, parameter in original.named_parameters():
            if parameter.ndim > 1:
                kept = local_of(parameter) != 0
                before += [(copy.get_parameter(name), kept) for copy in copies.children()]
    if not any(".base_layer." in name for name, _ in model.named_parameters()):
        raise ValueError("the model has no adapters: none of its layers has a base_layer, as PEFT's have")
    for module, name, _ in masks:
        undo_reparametrization(module, name)
    try:
        return merge(**options)
    finally:
        for module, name, mask in masks:
            reparametrize(module, name, mask, Fsdp2Params().release(module, name))
        for tensor, kept in before:
            zero_where_pruned(local_of(tensor), kept)
