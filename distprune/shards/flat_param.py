"""FSDP1 (``FullyShardedDataParallel``): parameters as runs of a flattened one. No communication.

The parameters of a wrapped module are flattened and joined, and each rank holds one range of the whole. So a rank's
part of a parameter is a run of its flat indices, which may cut a row or be empty. ``FlatParameter``
(``torch/distributed/fsdp/_flat_param.py``) documents the layout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard, Ownership
from distprune.shards.torch_private import private

_reshard = private("torch.distributed.fsdp._runtime_utils", "_reshard")


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether FSDP1 holds this parameter in a flat one (``use_orig_params=True``)."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def find_flat_parts(model: nn.Module) -> dict[int, dict[str, LocalShard]]:
    """Return this rank's parts by the id of their module and their name in it, tied weights under all their names.

    The geometry of a part is in the flattened parameter. Flat parameters that are still unsharded after a forward are
    resharded first.
    """
    parts: dict[int, dict[str, LocalShard]] = {}
    for wrapped in model.modules():
        if not isinstance(wrapped, FullyShardedDataParallel) or wrapped._handle is None:
            continue
        handle: Any = wrapped._handle
        flat: Any = handle.flat_param
        is_sharded = handle.uses_sharded_strategy
        reshard = ownership = None  # whole on every rank: the owner is open
        if is_sharded:
            reshard = partial(_reshard_if_ready, wrapped, handle)
            reshard()
            ownership = Ownership(mesh_ranks=frozenset(dist.get_process_group_ranks(handle.process_group)))
        data = flat.detach()
        for info, shape, numel, place in zip(
            flat._param_infos, flat._shapes, flat._numels, flat._shard_param_infos, strict=True
        ):
            first, start, stop = 0, 0, 0
            if place.in_shard:
                first, start, stop = place.offset_in_shard, place.intra_param_start_idx, place.intra_param_end_idx + 1
            local, geometry = data[first : first + stop - start], Geometry.rows((numel,), start, stop)
            part = LocalShard(info.param_name, local, geometry, ownership, original_shape=tuple(shape), reshard=reshard)
            parts.setdefault(id(info.module), {})[info.param_name] = part
        for shared in flat._shared_param_infos:
            part = parts[id(shared.prim_module)][shared.prim_param_name]
            parts.setdefault(id(shared.module), {})[shared.param_name] = part
    return parts


def _reshard_if_ready(wrapped: nn.Module, handle: Any) -> None:
    if "_local_shard" in handle.flat_param.__dict__:  # set up by the first forward
        _reshard(wrapped, handle, free_unsharded_flat_param=True)
