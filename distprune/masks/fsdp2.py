"""FSDP2 from inside: the mask, multiplied into the shard before the all-gather, and forwards that are run in parts.

Nouns are torch's (``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``): the *sharded parameter* is
the DTensor an optimizer holds, the *sharded data* its padded local values, from which every all-gather
is filled. A pruned parameter hands out its sharded data already masked. So no rank ever holds a whole
mask, the product costs 1/N, and everything after it (mixed precision, resharding to a smaller mesh,
prefetching, CPU offload) is FSDP2's own.

FSDP2 does not expect a forward that is run block by block, or stopped: we must tell it what stays gathered in between,
and when the forward is over.

Only this file and ``fsdp2_resize`` know private names of FSDP2. Where torch has moved one, pruning or calibrating a
module that FSDP2 manages raises an error; importing this file does not.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.collectives import gather_pairwise
from distprune.shards import Inside, private

_FSDP2 = "torch.distributed.fsdp._fully_shard."
if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
else:
    FSDPParam = private(_FSDP2 + "_fsdp_param", "FSDPParam")
    FSDPState = private(_FSDP2 + "_fsdp_state", "FSDPState")
_DefaultAllGather = private(_FSDP2 + "_fsdp_collectives", "DefaultAllGather")
_FSDPMeshInfo = private(_FSDP2 + "_fsdp_common", "FSDPMeshInfo")
_TrainingState = private(_FSDP2 + "_fsdp_common", "TrainingState")
_module_state_mapping = private("torch.distributed._composable_state", "_module_state_mapping")

__all__ = ["FSDPParam", "Fsdp2Params", "Managed", "kept_gathered", "own_params", "reset_forward", "take_roots"]

# What this file reads and overrides.
_INSIDE = Inside(
    "FSDP2",
    {
        ("torch.distributed._composable_state", "_module_state_mapping"): (),
        (_FSDP2 + "_fsdp_collectives", "DefaultAllGather"): (),
        (_FSDP2 + "_fsdp_common", "FSDPMeshInfo"): (),
        (_FSDP2 + "_fsdp_common", "TrainingState"): ("IDLE",),
        (_FSDP2 + "_fsdp_param", "FSDPParam"): (
            "_module_info",
            "_sharded_param_data",
            "sharded_param",
            "reset_sharded_param",
            "mesh_info",
            "param_dtype",
            "orig_dtype",
            "fsdp_placement",
            "_sharded_local_tensor",
            "all_gather_inputs",
            "all_gather_outputs",
            "init_all_gather_outputs",
            "alloc_all_gather_outputs",
            "init_unsharded_param",
        ),
        (_FSDP2 + "_fsdp_param", "ParamModuleInfo"): ("module", "param_name", "shared_modules", "shared_param_names"),
        (_FSDP2 + "_fsdp_param_group", "FSDPParamGroup"): (
            "fsdp_params",
            "device",
            "post_forward_mesh_info",
            "mesh_info",
            "reshard",
            "_training_state",
            "_all_gather_comm",
            "_all_gather_process_group",
            "_all_gather_result",
            "is_sharded",
            "_to_unsharded",
        ),
        (_FSDP2 + "_fsdp_state", "FSDPState"): (
            "_lazy_init",
            "_state_ctx",
            "_modules_to_run_forward",
            "_training_state",
        ),
        (_FSDP2 + "_fsdp_state", "FSDPStateContext"): ("iter_forward_root",),
        ("torch.distributed.fsdp", "FSDPModule"): ("_get_fsdp_state",),
        ("torch.distributed.tensor", "DTensor"): ("_local_tensor",),
        ("torch", "Tensor"): ("_post_accumulate_grad_hooks",),
    },
    "prune in place with distprune.prune_model",
)


class _MaskedParam(FSDPParam):
    """An ``FSDPParam`` whose all-gathers start from masked data. Instances change into it and back."""

    @property  # type: ignore[explicit-override]
    def _sharded_param_data(self) -> torch.Tensor:
        """The product of data and mask, 1-D and padded, made anew for every all-gather."""
        data: torch.Tensor = self.__dict__["_sharded_param_data"]
        local_mask = _local_mask(self)
        if local_mask.numel() == data.numel():
            return data * local_mask.view(-1).to(data.device)
        masked = data.clone()
        masked[: local_mask.numel()].mul_(local_mask.reshape(-1).to(data.device))  # the rest is padding
        return masked

    @_sharded_param_data.setter
    def _sharded_param_data(self, data: torch.Tensor) -> None:
        self.__dict__["_sharded_param_data"] = data

    @override
    def reset_sharded_param(self) -> None:
        """Look for a new sharded parameter, as after ``.to()`` or ``load_state_dict(assign=True)``."""
        param: Any = self
        param.__class__ = FSDPParam  # it compares storages: let it see the data themselves
        try:
            param.reset_sharded_param()
        finally:
            param.__class__ = _MaskedParam
            _watch_gradient(self)


def _local_mask(param: FSDPParam) -> torch.Tensor:
    """Return this rank's mask as bytes: multiplying by them is three times as fast as by bools on a CPU."""
    info = param._module_info
    mask = info.module.get_buffer(info.param_name.removesuffix("_orig") + "_mask")
    if not isinstance(mask, DTensor):
        raise ValueError(
            f"the mask of {info.param_name!r} is a plain tensor of shape {tuple(mask.shape)}, its parameter is sharded "
            "by FSDP2; call distprune.shard_masks(model) after loading or moving masks"
        )
    return mask._local_tensor.view(torch.uint8)


def _watch_gradient(param: Any) -> None:
    """Mask the sharded gradient as FSDP2 accumulates it: the unsharded weight's is dense."""
    sharded: Any = param.sharded_param
    # No reference to the tensor is kept: module.to() would refuse to swap it.
    if param.__dict__.get("_watch") is not None and param._watch.id in (sharded._post_accumulate_grad_hooks or {}):
        return
    if not sharded.requires_grad:
        return
    reference = weakref.ref(param)

    def mask_gradient(parameter: torch.Tensor) -> None:
        param = reference()
        if param is not None and parameter.grad is not None:
            gradient = cast(DTensor, parameter.grad)._local_tensor
            gradient.mul_(_local_mask(param).to(gradient.device))

    param._watch = sharded.register_post_accumulate_grad_hook(mask_gradient)
    # Before those that were there: an optimizer that steps within the backward pass.
    sharded._post_accumulate_grad_hooks.move_to_end(param._watch.id, last=False)


@dataclass(frozen=True)
class Managed:
    """One parameter that FSDP2 manages."""

    param: Any  # FSDPParam
    group: Any  # FSDPParamGroup

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that it is gathered in."""
        dtype: torch.dtype = self.param.mp_policy.param_dtype or self.sharded.dtype
        return dtype

    @property
    def is_shared(self) -> bool:
        """Whether several modules use this one parameter (tied weights)."""
        return bool(self.param._module_info.shared_modules)

    @property
    def name(self) -> str:
        """Return the parameter's name in its module."""
        return str(self.param._module_info.param_name)

    @property
    def ranks(self) -> frozenset[int]:
        """The global ranks over which FSDP2 shards and replicates it: data-parallel, each with samples of its own."""
        return frozenset(int(rank) for rank in self.param.mesh_info.mesh.mesh.flatten())

    @property
    def is_masked(self) -> bool:
        return isinstance(self.param, _MaskedParam)

    @property
    def sharded(self) -> DTensor:
        """What an optimizer holds."""
        return cast(DTensor, self.param.sharded_param)

    @property
    def dtype(self) -> torch.dtype:
        """What it is gathered as, which mixed precision may say."""
        return cast(torch.dtype, self.param.param_dtype or self.param.orig_dtype)

    def rename(self, name: str, *, masked: bool) -> None:
        """Follow the parameter to its new ``name`` in its module; mask it from now on, or no longer."""
        param = self.param
        param._module_info.param_name = name
        param.__class__ = _MaskedParam if masked else FSDPParam
        if masked:
            _watch_gradient(param)
        elif param.__dict__.get("_watch") is not None:
            (param.sharded_param._post_accumulate_grad_hooks or {}).pop(param._watch.id, None)
            param._watch = None


def _instances_of(cls: type[Any]) -> Iterator[nn.Module]:
    """Yield all modules of classes below ``cls``, each by what refers to its class.

    ``gc.get_objects`` would hold a reference to everything: then a tuple that another thread is building breaks.
    """
    for subclass in cls.__subclasses__():
        yield from (thing for thing in gc.get_referrers(subclass) if type(thing) is subclass)
        yield from _instances_of(subclass)


class Fsdp2Params:
    """Finds what FSDP2 manages; made once for a call, after which modules must not be sharded."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], Managed] = {}
        self._unknown: set[int] = set()  # of modules
        if _INSIDE.missing:
            self._unknown.update(id(part) for module in _instances_of(FSDPModule) for part in module.modules())
            return
        for reference in _all_states():
            state = reference()
            for managed in _managed_by(state) if isinstance(state, FSDPState) else ():
                info = managed.param._module_info
                self._found[id(info.module), info.param_name] = managed
                for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    self._found[id(module), name] = managed

    def find(self, module: nn.Module, name: str) -> Managed | None:
        """Return what FSDP2 manages under ``name`` in ``module``, if it does.

        Raises:
            NotImplementedError: it does, but this torch names its parts differently.
        """
        if id(module) in self._unknown:
            _INSIDE.check()
        return self._found.get((id(module), name))

    def release(self, module: nn.Module, name: str) -> Managed | None:
        """Put what FSDP2 manages under ``name`` in ``module`` back to its shards, and return it. No communication."""
        managed = self.find(module, name)
        if managed is not None:
            managed.group.reshard()
        return managed


def own_params(module: nn.Module) -> list[Managed]:
    """Return what FSDP2 gathers before the forward of ``module`` itself; nothing if it does not manage it."""
    state = _state_of(module)
    return [] if state is None else _managed_by(state)


def take_roots(model: nn.Module) -> None:
    """Let FSDP2 take the outermost modules that it manages in ``model`` for roots, as their first forwards would.

    Then it knows all that it manages in them, also what a forward that is caught half way does not reach. Local.
    """
    if (state := _state_of(model)) is not None:
        state._lazy_init()
    else:
        for child in model.children():
            take_roots(child)


def reset_forward(model: nn.Module) -> None:
    """Put all of ``model`` back to its shards, and to where no forward has begun: one was stopped, or will be.

    FSDP2 keeps what it has gathered for a forward that has not ended, and does not prepare for the backward of
    what it takes for a part of it. (torch 2.13 has ``FSDPModule.reset_iter_state`` for it.) Local.
    """
    for state in _states_in(model):
        state._training_state = _TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._modules_to_run_forward.clear()
        for group in _groups(state):
            group._training_state = _TrainingState.IDLE
            group.reshard()


@contextmanager
def kept_gathered(module: nn.Module) -> Iterator[None]:
    """Let what FSDP2 gathers for forwards of ``module`` stay so from one to the next; reshard it at the end.

    FSDP2 must know its roots (:func:`take_roots`). Over gloo, unless the user said how, all of it is gathered at
    once by messages from rank to rank: half as long as FSDP2 takes, and half its memory. Every rank must call it.
    """
    groups = [group for state in _states_in(module) for group in _groups(state)]
    before = [group.post_forward_mesh_info for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info = None  # reshard_after_forward=False
            if _is_gathered_pairwise(group):
                _gather(group)
        yield
    finally:
        for group, mesh_info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh_info
        reset_forward(module)


def _is_gathered_pairwise(group: Any) -> bool:
    return bool(
        isinstance(group.mesh_info, _FSDPMeshInfo)  # else replicated
        and group.is_sharded
        and group._all_gather_result is None  # nothing is under way
        and type(group._all_gather_comm) is _DefaultAllGather
        and group.device.type == "cpu"
        and dist.get_backend(group._all_gather_process_group) == "gloo"
        and all(
            param.fsdp_placement.dim == 0 and not hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
            for param in group.fsdp_params
        )
    )


def _gather(group: Any) -> None:
    """Gather the parameters of ``group`` right into the tensors that their modules compute with.

    FSDP2 gathers all of them into one buffer and copies them from there.
    """
    process_group = group._all_gather_process_group
    rank, num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    wholes: list[torch.Tensor] = []
    with torch.no_grad():
        for param in group.fsdp_params:
            (local,) = param.all_gather_inputs  # 1-D and padded, in the dtype to gather in, masked
            param.init_all_gather_outputs([local.numel()], [local.dtype], num_ranks, group.device)
            param.alloc_all_gather_outputs()
            wholes += param.all_gather_outputs
            wholes[-1][rank * local.numel() : (rank + 1) * local.numel()] = local
        gather_pairwise(process_group, wholes)
    for param in group.fsdp_params:
        param.init_unsharded_param()
    group._to_unsharded()


def _state_of(module: nn.Module) -> FSDPState | None:
    if not isinstance(module, FSDPModule):
        return None
    _INSIDE.check()
    return module._get_fsdp_state()


def _states_in(model: nn.Module) -> list[Any]:
    return [state for module in model.modules() if (state := _state_of(module)) is not None]


def _all_states() -> list[weakref.ReferenceType[Any]]:
    while True:  # another thread may be sharding its own model
        try:
            return list(_module_state_mapping.values())
        except RuntimeError:
            continue


def _managed_by(state: FSDPState) -> list[Managed]:
    return [Managed(param, group) for group in _groups(state) for param in group.fsdp_params]


def _groups(state: FSDPState) -> list[Any]:
    if "_fsdp_param_groups" in state.__dict__:  # torch 2.13 on
        return list(state._fsdp_param_groups)
    group = state.__dict__.get("_fsdp_param_group")
    return [] if group is None else [group]
