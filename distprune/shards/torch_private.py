"""The private names of torch that this library uses: a missing one is an error where it is needed, not at import."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["FSDP1", "FSDP2", "FSDPParam", "FSDPState", "Inside", "StridedShard", "find_private", "private"]


def find_private(module: str, name: str) -> Any:
    """Return ``name`` of torch's ``module``, or ``None`` if torch has no such name."""
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def private(module: str, name: str) -> Any:
    """Return ``name`` of torch's ``module``. If torch has no such name, return a class in its place.

    Nothing is an instance of that class. Calling it raises ``NotImplementedError``.
    """

    def raises(*_: object, **__: object) -> None:
        raise _moved(f"{module}.{name}")

    found = find_private(module, name)
    return type(name, (), {"__new__": raises}) if found is None else found


_FSDP1, _FSDP2 = "torch.distributed.fsdp.", "torch.distributed.fsdp._fully_shard."
if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
else:
    FSDPParam = private(_FSDP2 + "_fsdp_param", "FSDPParam")
    FSDPState = private(_FSDP2 + "_fsdp_state", "FSDPState")
    StridedShard = private("torch.distributed.tensor.placement_types", "_StridedShard")


@dataclass(frozen=True)
class Inside:
    """Private names of one of torch's features: (module, name), and the attributes of objects by their class's name."""

    feature: str
    names: Sequence[tuple[str, str]]
    attributes: Mapping[str, Sequence[str]]
    advice: str
    _known: set[type] = field(default_factory=set)  # that have all their attributes

    @cached_property
    def missing(self) -> list[str]:
        """The names that this torch does not have."""
        return [f"{module}.{name}" for module, name in self.names if find_private(module, name) is None]

    def check(self, *objects: object) -> None:
        """Check that this torch has all the names, and ``objects`` their attributes.

        Raises:
            NotImplementedError: it names what is missing and the version of torch.
        """
        missing = [*self.missing]
        for thing in objects if not missing else ():
            if type(thing) not in self._known:
                names = [name for part in type(thing).__mro__ for name in self.attributes.get(part.__name__, ())]
                # Not hasattr: properties would be run.
                absent = [name for name in names if inspect.getattr_static(thing, name, Inside) is Inside]
                missing += [f"{type(thing).__name__}.{name}" for name in absent]
                self._known.update([] if missing else [type(thing)])
        if missing:
            raise _moved(", ".join(missing), f" for {self.feature}", f", or {self.advice}")


FSDP1 = Inside(
    "FSDP1",
    [
        (_FSDP1 + "_runtime_utils", "_reshard"),
        (_FSDP1 + "_common_utils", "FSDP_FLATTENED"),  # "_fsdp_flattened"
    ],
    {
        "FullyShardedDataParallel": ("_handle",),
        "FlatParamHandle": ("flat_param", "uses_sharded_strategy", "process_group"),
        "Parameter": (  # a FlatParameter
            "_param_infos",
            "_shapes",
            "_numels",
            "_shard_param_infos",
            "_shared_param_infos",
        ),
    },
    "shard the model with fully_shard (FSDP2)",
)
# torch 2.13 has public calls that come near, and do other things: FSDPModule.set_reshard_after_forward does not say how
# it was before, and takes no replicated groups; reset_iter_state is for roots alone, and drops gradients that are being
# accumulated.
FSDP2 = Inside(
    "FSDP2",
    [
        ("torch.distributed._composable_state", "_module_state_mapping"),
        (_FSDP2 + "_fsdp_collectives", "DefaultAllGather"),
        (_FSDP2 + "_fsdp_common", "FSDPMeshInfo"),
        (_FSDP2 + "_fsdp_common", "TrainingState"),
        (_FSDP2 + "_fsdp_param", "FSDPParam"),
        (_FSDP2 + "_fsdp_state", "FSDPState"),
    ],
    {
        "FSDPModule": ("_get_fsdp_state",),
        "FSDPState": (
            "_fsdp_param_group",
            "_lazy_init",
            "_modules",
            "_modules_to_run_forward",
            "_state_ctx",
            "_states_to_backward_prefetch",
            "_states_to_forward_prefetch",
            "_training_state",
        ),
        "FSDPStateContext": ("all_states", "iter_forward_root", "post_backward_final_callback_queued"),
        "FSDPParamGroup": (
            "_all_gather_comm",
            "_all_gather_process_group",
            "_all_gather_result",
            "_module_to_pre_load_state_dict_hook_handle",
            "_module_to_pre_save_state_dict_hook_handle",
            "_post_forward_indices",
            "_reset_sharded_params",
            "_to_unsharded",
            "_training_state",
            "comm_ctx",
            "device",
            "fsdp_params",
            "is_sharded",
            "mesh_info",
            "post_forward_mesh_info",
            "reshard",
        ),
        "FSDPParam": (
            "_module_info",
            "_orig_size",
            "_param_fqn",
            "_post_load_hook_handle",
            "_setattr_on_modules",
            "_sharded_local_tensor",
            "_sharded_param_data",
            "_sharding_spec",
            "all_gather_inputs",
            "all_gather_outputs",
            "alloc_all_gather_outputs",
            "device",
            "fsdp_placement",
            "init_all_gather_outputs",
            "init_dtype_attrs",
            "init_unsharded_param",
            "mesh_info",
            "mp_policy",
            "offload_to_cpu",
            "pin_memory",
            "post_forward_mesh_info",
            "reset_sharded_param",
            "sharded_param",
        ),
        "ParamModuleInfo": ("module", "param_name", "shared_modules", "shared_param_names"),
        "DTensor": ("_local_tensor", "_post_accumulate_grad_hooks", "_spec"),
    },
    "prune in place with distprune.prune_model",
)


def _moved(names: str, feature: str = "", advice: str = "") -> NotImplementedError:
    return NotImplementedError(
        f"torch {torch.__version__} has no {names}, on which distprune relies{feature}; use torch 2.11 "
        f"to 2.15, with which distprune is tested{advice}"
    )
