"""FSDP2 from inside: which parameters it manages. No communication.

Nouns are torch's (``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``): the *sharded parameter* is
the DTensor an optimizer holds, the *sharded data* its padded local values, from which every all-gather
is filled.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distprune.shards.torch_private import FSDPState, private

_module_state_mapping = private("torch.distributed._composable_state", "_module_state_mapping")


@dataclass(frozen=True)
class Managed:
    """One parameter that FSDP2 manages."""

    param: Any  # FSDPParam
    group: Any  # FSDPParamGroup

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that it is gathered in, which mixed precision may say."""
        dtype: torch.dtype = self.param.mp_policy.param_dtype or self.sharded.dtype
        return dtype

    @property
    def is_shared(self) -> bool:
        """Whether several modules use this one parameter (tied weights)."""
        return bool(self.param._module_info.shared_modules)

    @property
    def ranks(self) -> frozenset[int]:
        """The global ranks over which FSDP2 shards and replicates it: data-parallel, each with samples of its own."""
        return frozenset(int(rank) for rank in self.param.mesh_info.mesh.mesh.flatten())

    @property
    def sharded(self) -> DTensor:
        """What an optimizer holds."""
        return cast(DTensor, self.param.sharded_param)


# What FSDP2 manages in a module, as it was found last: looking for one parameter is not looking through all.
_Reference: TypeAlias = "weakref.ReferenceType[Any]"
_found_last: weakref.WeakKeyDictionary[nn.Module, list[tuple[_Reference, _Reference]]] = weakref.WeakKeyDictionary()


class Fsdp2Params:
    """Finds what FSDP2 manages; made once for a call, after which modules must not be sharded.

    What was found before is looked up. What was not is looked for among all that FSDP2 manages, once.
    """

    def __init__(self) -> None:
        self._has_looked = False

    def find(self, module: nn.Module, name: str) -> Managed | None:
        """Return what FSDP2 manages under ``name`` in ``module``, if it does."""
        for of_param, of_group in _found_last.get(module, ()):
            param, group = of_param(), of_group()
            if param is not None and group is not None and (module, name) in _places_of(param):
                return Managed(param, group)
        if self._has_looked:
            return None
        self._has_looked = True
        _look_for_all()
        return self.find(module, name)

    def release(self, module: nn.Module, name: str) -> Managed | None:
        """Put what FSDP2 manages under ``name`` in ``module`` back to its shards, and return it. No communication."""
        managed = self.find(module, name)
        if managed is not None:
            managed.group.reshard()
        return managed


def _look_for_all() -> None:
    by_module: dict[nn.Module, list[tuple[_Reference, _Reference]]] = {}
    for reference in _all_states():
        state = reference()
        for managed in _managed_by(state) if isinstance(state, FSDPState) else ():
            references = weakref.ref(managed.param), weakref.ref(managed.group)
            for module in {module for module, _ in _places_of(managed.param)}:
                by_module.setdefault(module, []).append(references)
    _found_last.update(by_module)


def state_of(module: nn.Module) -> FSDPState | None:
    """Return what FSDP2 knows of ``module`` itself, or ``None``. Local."""
    return module._get_fsdp_state() if isinstance(module, FSDPModule) else None


def groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of ``state``. Local."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 knows one at most
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def replace_managed(before: Any, now: Managed) -> None:
    """Find ``now`` where the FSDPParam ``before`` was found, in modules whose other parameters are as they were."""
    for module in {module for module, _ in _places_of(before)}:
        others = [found for found in _found_last.get(module, ()) if found[0]() is not before]
        _found_last[module] = [*others, (weakref.ref(now.param), weakref.ref(now.group))]


def forget_places(modules: Iterable[nn.Module]) -> None:
    """Look for what FSDP2 manages in ``modules`` anew from now on: it has changed."""
    for module in modules:
        _found_last.pop(module, None)


def _places_of(param: Any) -> list[tuple[nn.Module, str]]:
    """Return (module, name in it) of an FSDPParam, everywhere it is."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def _all_states() -> list[weakref.ReferenceType[Any]]:
    while True:  # another thread may be sharding its own model
        try:
            return list(_module_state_mapping.values())
        except RuntimeError:
            continue


def _managed_by(state: FSDPState) -> list[Managed]:
    return [Managed(param, group) for group in groups_of(state) for param in group.fsdp_params]
