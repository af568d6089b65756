"""Which weights of a model are there now, read off its masks or its zeros. No communication."""

from __future__ import annotations

import torch

from distprune.masks.in_place import zero_where_pruned
from distprune.masks.reparametrized import mask_of
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard, flat_chunks


def present(shard: LocalShard) -> torch.Tensor:
    """Return what is left of a shard, bool: where it is not zero, nor its mask, if it is reparametrized."""
    mask = mask_of(shard)
    present = torch.empty(shard.geometry.local_shape, dtype=torch.bool, device=shard.local.device)
    for start, values in flat_chunks(shard.local):
        torch.ne(values, 0, out=present.view(-1)[start : start + values.numel()])
    return present if mask is None else present.logical_and_(mask)


def product_shard(shard: LocalShard) -> LocalShard:
    """Return the shard of the product, new, if the parameter is reparametrized, else the shard itself. Local."""
    mask = mask_of(shard)
    if mask is None:
        return shard
    product = shard.local.clone()
    zero_where_pruned(product, mask)
    return shard.having(local=product)


def values_now(fsdp2: Fsdp2Params, shard: LocalShard) -> torch.Tensor:
    """Return the local part of the shard's parameter, which another may have replaced. What FSDP left whole is cut."""
    if shard.reshard is not None:
        shard.reshard()
    if shard.module is None or shard.tensor is None:  # rows spread by hand, FSDP1
        return shard.local
    for name in (shard.attribute, f"{shard.attribute}_orig"):
        fsdp2.release(shard.module, name)
        tensor = shard.module._parameters.get(name)
        if tensor is not None and (now := local_shard(shard.name, tensor)).geometry == shard.geometry:
            return now.local
    raise ValueError(f"{shard.name!r} is gone, or laid out otherwise than its mask; choose the masks anew")
