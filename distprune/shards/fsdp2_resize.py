"""FSDP2 from inside, where parameters get another size or leave: the model stays wrapped as it is.

FSDP2 makes all that it keeps of a parameter (shard and padding, sizes, buffers to gather into) from the parameter that
``fully_shard`` is given. So a parameter of another size gets a new ``FSDPParam``, in the place of the one before, as
``fully_shard`` makes it of a parameter on the meta device; the shard is put in as ``load_state_dict(assign=True)``
would. What wraps modules (hooks, groups, prefetching, policies) stays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from distprune.shards.fsdp2 import Managed, forget_places, groups_of, replace_managed, state_of
from distprune.shards.torch_private import FSDPParam, private

# torch 2.11 has none: the placement is all that it asks for.
_ShardPlacementResult = private(
    "torch.distributed.fsdp._fully_shard._fsdp_common", "ShardPlacementResult", is_optional=True
)


def even_parts(parameter: torch.Tensor, managed: Managed | None, dim: int) -> tuple[int, int]:
    """Return by what ``dim`` has to be divisible, and by what the number of units along it has to be. Local.

    FSDP2 pads dim 0 alone. Tensor-parallel layers compute with equal parts, of whole units.
    """
    if managed is None:
        num = _num_parts(parameter._spec, dim) if isinstance(parameter, DTensor) else 1
        return num, num
    spec = _spec_before(managed.param)
    num = 1 if spec is None else _num_parts(spec, dim)
    return _num_parts(managed.sharded._spec, dim) if dim > 0 else num, num


def _spec_before(param: Any) -> Any:
    """Return the layout that a parameter has apart from FSDP2, of tensor parallelism; ``None`` if it is whole."""
    if hasattr(param, "_unsharded_dtensor_spec"):
        return param._unsharded_dtensor_spec
    return param._tp_spec if param.is_dtensor else None  # torch 2.11


def _num_parts(layout: Any, dim: int) -> int:
    """Return into how many parts ``dim`` is cut; ``layout`` has a mesh and placements."""
    cuts = (axis for axis, placement in enumerate(layout.placements) if getattr(placement, "dim", None) == dim)
    return math.prod(layout.mesh.size(axis) for axis in cuts)


def resize(managed: Managed, shape: Sequence[int], local: torch.Tensor) -> None:
    """Let FSDP2 manage a parameter of the global ``shape`` in the place of the one before, with the shard ``local``.

    It is sharded as before. The parameter must not be gathered. Local.
    """
    before, size = managed.param, torch.Size(shape)
    spec = _spec_before(before)
    stride = torch.empty(size, dtype=local.dtype, device="meta").stride()
    dtype, requires_grad = before.sharded_param.dtype, before.sharded_param.requires_grad
    if spec is None:
        whole = torch.empty(size, dtype=dtype, device="meta")
    else:
        held = zip(size, spec.shape, before._orig_size, strict=True)
        local_size = [own if now == was else now // _num_parts(spec, dim) for dim, (now, was, own) in enumerate(held)]
        whole = DTensor.from_local(
            torch.empty(local_size, dtype=dtype, device="meta"),
            spec.mesh,
            spec.placements,
            run_check=False,
            shape=size,
            stride=stride,
        )
    placement = before.fsdp_placement
    if _ShardPlacementResult is not None:
        placement = _ShardPlacementResult(placement, before.mesh_info)
    before._post_load_hook_handle.remove()
    param: Any = FSDPParam(
        nn.Parameter(whole, requires_grad),
        before._module_info,
        before.mesh_info,
        before.post_forward_mesh_info,
        before.device,
        lambda _: placement,
        before.mp_policy,
        CPUOffloadPolicy(pin_memory=before.pin_memory) if before.offload_to_cpu else OffloadPolicy(),
    )
    now = param._sharding_spec
    sharded = DTensor.from_local(local, now.mesh, now.placements, run_check=False, shape=size, stride=stride)
    param._setattr_on_modules(nn.Parameter(sharded, requires_grad))
    param.reset_sharded_param()
    param._param_fqn = before._param_fqn
    if managed.group._reset_sharded_params:  # a forward has run
        param.init_dtype_attrs(param.mp_policy)
    managed.group.fsdp_params = [param if other is before else other for other in managed.group.fsdp_params]
    replace_managed(before, Managed(param, managed.group))


def drop_modules(model: nn.Module, dropped: Collection[nn.Module]) -> None:
    """Let FSDP2 forget ``dropped``, modules that leave ``model`` with all that is in them. Local.

    Raises:
        NotImplementedError: one is sharded in one group with modules that stay; nothing is changed.
    """
    states: dict[Any, None] = {state: None for m in model.modules() if (state := state_of(m)) is not None}
    inside = {part for module in dropped for part in module.modules()}
    for state in states:
        leaving = [module in inside for module in state._modules]
        if any(leaving) and not all(leaving):
            raise NotImplementedError(
                "fully_shard has been called with a list of which some modules leave the model and others stay; "
                "shard each by itself"
            )
    forget_places(inside)
    left = [state for state in states if not all(module in inside for module in state._modules)]
    for state in left:
        for group in groups_of(state):
            group.fsdp_params = [param for param in group.fsdp_params if param._module_info.module not in inside]
            for hooks in (
                group._module_to_pre_save_state_dict_hook_handle,
                group._module_to_pre_load_state_dict_hook_handle,
            ):
                for module in inside & hooks.keys():
                    del hooks[module]
        for others in (
            state._state_ctx.all_states,
            state._states_to_forward_prefetch,
            state._states_to_backward_prefetch,
        ):
            others[:] = [state for state in others if state not in states or state in left]
