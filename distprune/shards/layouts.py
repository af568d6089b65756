"""From a tensor in any layout to its LocalShard, and back. No communication."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from distprune.collectives.roster import Layout
from distprune.shards.device import on_host, sent
from distprune.shards.geometry import Geometry, Split, runs_of_splits
from distprune.shards.local_shard import LocalShard, Ownership, cut
from distprune.shards.torch_private import StridedShard, private

_is_packed = private("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")


def local_shard(name: str, tensor: torch.Tensor, module: nn.Module | None = None, attribute: str = "") -> LocalShard:
    """Return this rank's part of ``tensor``, which ``module`` holds under ``attribute``.

    A plain tensor is held whole and its owner is open (see :class:`LocalShard`). The owner of a DTensor within its mesh
    follows from the mesh. A rank outside the mesh holds nothing.

    Raises:
        NotImplementedError: a ``Partial`` placement, or one this library does not know; values that are packed (as by
            torchao) or stored sparsely.
        TypeError: ``tensor`` is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    local, ownership = local_of(tensor).detach(), None
    if isinstance(tensor, DTensor):
        geometry, ownership = _place_of(name, tensor)
        # FSDP2 keeps an empty shard's padding shape on some dims, and outside of the mesh there is none: only the count
        # matters.
        if geometry.local_numel == 0 and tuple(local.shape) != geometry.local_shape:
            local = local.new_empty(geometry.local_shape)
    else:
        geometry = Geometry.whole(tensor.shape)
    if _is_packed(local) or local.layout is not torch.strided:
        kind = type(local).__name__ if local.layout is torch.strided else str(local.layout).removeprefix("torch.")
        raise NotImplementedError(
            f"the values of {name!r} are packed ({kind}); prune before the model is quantized or compressed"
        )
    return LocalShard(name, local, geometry, ownership, tensor=tensor, module=module, attribute=attribute)


def is_held(tensor: torch.Tensor) -> bool:
    """Return whether this rank can hold a part of ``tensor``: not if it is outside of a DTensor's mesh."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``: its local tensor, detached, where it is a DTensor, else itself."""
    # What to_local() does for gradients takes ten times as long.
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor


def address_of(tensor: torch.Tensor) -> int:
    """Return where this rank's part of ``tensor`` begins; 0 if it is empty, or has no memory, or not one (sparse)."""
    try:
        return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()
    except RuntimeError:  # torch has nothing else that tells for every layout and subclass
        return 0


def is_laid_out_like(tensor: torch.Tensor, other: DTensor) -> bool:
    """Return whether ``tensor`` is a DTensor with the placements of ``other`` on the same mesh."""
    if not isinstance(tensor, DTensor):
        return False
    one, two = tensor._spec, other._spec
    return one is two or (one.placements == two.placements and one.mesh == two.mesh)


def splits_of(tensor: DTensor, dim: int, coordinate: Sequence[int]) -> list[Split]:
    """Return how ``dim`` of ``tensor`` is cut, by mesh axis, at ``coordinate`` of the mesh."""
    splits = []
    for axis, (index, placement) in enumerate(zip(coordinate, tensor.placements, strict=False)):
        if isinstance(placement, Shard | StridedShard) and placement.dim == dim:
            stride = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            splits.append(Split(tensor.device_mesh.size(axis), index, stride, axis))
    return splits


def dtensor_like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return the DTensor of ``local`` in the layout of ``tensor``."""
    return DTensor.from_local(
        local.reshape(local_of(tensor).shape),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_part(
    tensor: torch.Tensor, parameter: torch.Tensor | None, shard: LocalShard | None, what: str
) -> torch.Tensor:
    """Return the local part of ``tensor``: a whole tensor, or a DTensor of the parameter's shape. No communication.

    ``parameter``: as its module holds it, or ``None``. ``what`` names the tensor in an error.

    Raises:
        ValueError: ``tensor`` has another shape than the parameter, or a layout from which the local part would have to
            be communicated.
    """
    tensor = tensor.detach()
    shape = tuple(tensor.shape if shard is None else shard.shape)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"the {what} has the shape {tuple(tensor.shape)}, and its parameter {shape}")
    if isinstance(tensor, DTensor):
        if isinstance(parameter, DTensor) and is_laid_out_like(tensor, parameter):
            local = tensor.to_local()
            return local if shard is None else local.reshape(shard.local.shape)
        if not all(placement.is_replicate() for placement in tensor.placements):
            raise ValueError(
                f"the {what} is {_layout(tensor)}, its parameter is {_layout(parameter)}; redistribute it to the "
                "parameter's layout, or pass the whole of it on every rank"
            )
        tensor = tensor.to_local()
    if shard is None:
        return tensor.new_empty(0)
    part, device = cut(tensor.reshape(shard.geometry.global_shape), shard.geometry), shard.local.device
    return sent(part, device) if on_host(part.device) else part.to(device)


def _layout(tensor: torch.Tensor | None) -> str:
    if not isinstance(tensor, DTensor):
        return "plain"
    return f"a DTensor with {tensor.placements} on {tensor.device_mesh}"


# Parameters of one mesh and shape share them. A mesh is let go of with its last parameter.
_places: WeakKeyDictionary[DeviceMesh, dict[object, tuple[Geometry, Ownership]]] = WeakKeyDictionary()


def _place_of(name: str, tensor: DTensor) -> tuple[Geometry, Ownership]:
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    # Sub-meshes of one mesh are equal on all ranks, whichever ranks they hold there.
    places, key = _places.setdefault(mesh, {}), (dist.get_rank(), coordinate, placements, shape)
    if key in places:
        return places[key]
    if coordinate is None:
        return Geometry.nothing(shape), Ownership(owned=False)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise NotImplementedError(
                f"parameter {name!r} is a partial sum on mesh axis {axis} ({placement}); redistribute it to "
                "Replicate() or Shard(dim) first"
            )
        if type(placement) not in (Shard, StridedShard, Replicate):
            raise NotImplementedError(f"parameter {name!r} has a placement of unknown kind: {placement}")
    runs = [runs_of_splits(size, splits_of(tensor, dim, coordinate)) for dim, size in enumerate(shape)]
    # The ranks at this one's place on all axes but those of replicas.
    ranks = mesh.mesh
    axes = zip(coordinate, placements, strict=True)
    holders = ranks[tuple([slice(None) if placement.is_replicate() else index for index, placement in axes])]
    owned = int(ranks[tuple(coordinate)]) == int(holders.min())
    mesh_ranks = ranks.flatten().tolist()
    text = repr((tuple(ranks.shape), mesh_ranks, placements)).encode()
    layout = Layout(hashlib.sha256(text).hexdigest()[:16], len(mesh_ranks), holders.numel())
    ownership = Ownership(owned, holders.numel(), frozenset(mesh_ranks), layout)
    places[key] = Geometry(shape, tuple(runs)), ownership
    return places[key]


_reshard = private("torch.distributed.fsdp._runtime_utils", "_reshard")


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether FSDP1 holds this parameter in a flat one (``use_orig_params=True``)."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def find_flat_parts(model: nn.Module) -> dict[int, dict[str, LocalShard]]:
    """Return FSDP1's parts on this rank by the id of their module and their name in it, tied weights under all names.

    FSDP1 flattens and joins the parameters of a wrapped module, and each rank holds one range of the whole: its part of
    a parameter is a run of flat indices, which may cut a row or be empty (``torch/distributed/fsdp/_flat_param.py``).

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
