"""FSDP1 (``FullyShardedDataParallel``): parameters as runs of a flattened one. No communication.

The parameters of a wrapped module are flattened and joined, and each rank holds one range of the whole. So a rank's
part of a parameter is a run of its flat indices, which may cut a row or be empty. ``FlatParameter``
(``torch/distributed/fsdp/_flat_param.py``) documents the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from distprune.shards.geometry import Geometry
from distprune.shards.local_shard import LocalShard
from distprune.shards.torch_private import Inside, private

__all__ = ["FlatPart", "find_flat_parts", "is_flattened"]

_FSDP1 = "torch.distributed.fsdp."
_reshard = private(_FSDP1 + "_runtime_utils", "_reshard")
_INSIDE = Inside(
    "FSDP1",
    {
        (_FSDP1 + "_runtime_utils", "_reshard"): (),
        (_FSDP1 + "_common_utils", "FSDP_FLATTENED"): (),  # "_fsdp_flattened"
        ("torch.distributed.fsdp", "FullyShardedDataParallel"): ("_handle",),
        (_FSDP1 + "_flat_param", "FlatParamHandle"): ("flat_param", "uses_sharded_strategy", "process_group"),
        (_FSDP1 + "_flat_param", "FlatParameter"): (
            "_local_shard",
            "_param_infos",
            "_shapes",
            "_numels",
            "_shard_param_infos",
            "_shared_param_infos",
        ),
        (_FSDP1 + "_flat_param", "ParamInfo"): ("param_name", "module"),
        (_FSDP1 + "_flat_param", "SharedParamInfo"): ("param_name", "module", "prim_param_name", "prim_module"),
        (_FSDP1 + "_flat_param", "_ShardParamInfo"): (
            "in_shard",
            "offset_in_shard",
            "intra_param_start_idx",
            "intra_param_end_idx",
        ),
    },
    "shard the model with fully_shard (FSDP2)",
)


@dataclass(frozen=True, eq=False)
class FlatPart:
    """This rank's part of one original parameter of a ``FlatParameter``."""

    shape: tuple[int, ...]  # of the original parameter
    local: torch.Tensor  # 1-D, shares storage with the flat parameter
    geometry: Geometry  # of the flattened original
    mesh_ranks: torch.Tensor | None  # global ranks the flat parameter is sharded over; None: whole on every rank

    def local_shard(self, name: str) -> LocalShard:
        """Return the part as a shard; its global shape is that of the flattened parameter."""
        if self.mesh_ranks is None:
            return LocalShard(name, self.local, self.geometry, original_shape=self.shape)
        return LocalShard(
            name,
            self.local,
            self.geometry,
            owned=True,
            num_replicas=1,
            mesh_ranks=self.mesh_ranks,
            original_shape=self.shape,
        )


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether FSDP1 holds this parameter in a flat one (``use_orig_params=True``)."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def find_flat_parts(model: nn.Module) -> dict[tuple[int, str], FlatPart]:
    """Return this rank's parts by (id of the module, name in it), tied weights under all their names.

    Flat parameters that are still unsharded after a forward are resharded first.

    Raises:
        NotImplementedError: there is an FSDP1 module, and this torch names its parts differently.
    """
    parts: dict[tuple[int, str], FlatPart] = {}
    for wrapped in model.modules():
        if not isinstance(wrapped, FullyShardedDataParallel):
            continue
        _INSIDE.check()
        if wrapped._handle is None:
            continue
        handle: Any = wrapped._handle
        flat: Any = handle.flat_param
        is_sharded = handle.uses_sharded_strategy
        if is_sharded and "_local_shard" in flat.__dict__:  # set up by the first forward
            _reshard(wrapped, handle, free_unsharded_flat_param=True)
        ranks = torch.tensor(dist.get_process_group_ranks(handle.process_group)) if is_sharded else None
        data = flat.detach()
        for info, shape, numel, place in zip(
            flat._param_infos, flat._shapes, flat._numels, flat._shard_param_infos, strict=True
        ):
            start, stop = (place.intra_param_start_idx, place.intra_param_end_idx + 1) if place.in_shard else (0, 0)
            local = data[place.offset_in_shard :][: stop - start] if place.in_shard else data[:0]
            geometry = Geometry((numel,), ((((start, stop),) if stop > start else ()),))
            parts[id(info.module), info.param_name] = FlatPart(tuple(shape), local, geometry, ranks)
        for shared in flat._shared_param_infos:
            first = parts[id(shared.prim_module), shared.prim_param_name]
            parts[id(shared.module), shared.param_name] = first
    return parts
