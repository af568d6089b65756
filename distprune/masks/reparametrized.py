"""A parameter as a product: the contract of ``torch.nn.utils.prune``.

Nouns: ``name_orig`` is the *original*, the parameter itself under a new name, the same object as
before; ``name_mask`` is a buffer in the original's layout (bool where that is a DTensor, else of the
original's dtype); ``name`` is the *product* of the two. The product is in the module during its
forward: a pre-hook puts it there and a post-hook removes it. Outside it is computed on demand. So
it is never stale, takes no memory between steps, and modules can be copied and pickled. What is
written into it there is lost.

Under FSDP2 the original is masked before it is gathered (see ``fsdp2``), and during forward the
product is the gathered original itself.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from distprune.masks.fsdp2 import is_masked, rename
from distprune.masks.hooks import pruning_hooks
from distprune.masks.in_place import zero_where_pruned
from distprune.masks.plain_keys import join_keys, keys_are_plain, local_mask, take_plain_key, watch_savers
from distprune.shards.fsdp2 import Fsdp2Params, Managed
from distprune.shards.layouts import dtensor_like, is_laid_out_like, local_part
from distprune.shards.local_shard import LocalShard


def product(module: nn.Module, name: str) -> torch.Tensor:
    """Return mask times original, in the layout the original is in now. No communication.

    What FSDP2 has gathered, or cut otherwise after a forward, is masked already; a view of it is returned.

    Raises:
        ValueError: a mask of a layout from which the original's part of it would have to be communicated.
    """
    original: torch.Tensor = getattr(module, name + "_orig")
    mask: torch.Tensor = getattr(module, name + "_mask")
    if isinstance(mask, DTensor) and is_laid_out_like(original, mask):
        return original * mask
    if isinstance(mask, DTensor) and (not isinstance(original, DTensor) or is_masked(module, name + "_orig")):
        return original.view_as(original)
    if isinstance(original, DTensor):  # sharded after it was pruned, and its mask not with it
        return original * dtensor_like(original, local_mask(original, mask).to(original.dtype))
    return mask.to(dtype=original.dtype) * original


def mask_of(shard: LocalShard) -> torch.Tensor | None:
    """Return the mask of a reparametrized parameter, bool, local shape; ``None`` if it has none. Local."""
    mask = None if shard.module is None else shard.module._buffers.get(f"{shard.attribute}_mask")
    if mask is None or f"{shard.attribute}_orig" not in cast(nn.Module, shard.module)._parameters:
        return None
    return local_part(mask, shard.tensor, shard, "mask").reshape(shard.geometry.local_shape) != 0


class _Product:
    """The attribute ``module.name`` outside of the module's forward: computed on demand."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        parameters = module._parameters
        if self._name in parameters:  # the class may outlive the pruning
            return parameters[self._name]
        if self._name + "_orig" not in parameters:
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '{self._name}'")
        return product_of_hook(module, self._name)


def product_of_hook(module: nn.Module, name: str) -> torch.Tensor:
    """Return the product as the pruning hook computes it; a user's own hook may do it in its own way."""
    for hook in pruning_hooks(module, name).values():
        made: torch.Tensor = cast(Any, hook).apply_mask(module)
        return made
    return product(module, name)


@dataclass(frozen=True)
class DropProduct:
    """A forward hook that removes the product from the module again."""

    name: str

    def __call__(self, module: nn.Module, *_: Any) -> None:
        module.__dict__.pop(self.name, None)


class _Pruned(nn.Module):
    """What the class of a pruned module has before its own: ``_pruned_base`` is that one, with products as attributes.

    ``_pruned_names``: the names of the products.
    """

    _pruned_base: type[nn.Module]
    _pruned_names: frozenset[str]

    @override
    def __init_subclass__(cls, **_: Any) -> None:
        """Leave out what the module's own class does with its subclasses: this one is no other kind of module."""

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy without products: they follow from the original and the mask."""
        state: dict[str, Any] = dict(cast(Any, self).__getstate__() or {})
        for name in self._pruned_names:
            state.pop(name, None)
        if isinstance(self, nn.RNNBase):  # it lists its weights a second time
            state["_flat_weights"] = [
                None if name in self._pruned_names else weight
                for name, weight in zip(self._flat_weights_names, self._flat_weights, strict=True)
            ]
        return _rebuild, (self._pruned_base, tuple(sorted(self._pruned_names))), state

    @override
    def __delattr__(self, name: str) -> None:
        """Allow deleting a product that is not there at the moment: PyTorch's own ``remove`` does it."""
        if not (name in self._pruned_names and name not in self.__dict__ and name not in self._parameters):
            super().__delattr__(name)

    @override
    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Forget the product if its original is gone and its name is registered: PyTorch's ``remove`` does so.

        Raises:
            ValueError: the original is there: another weight would take the place of the product.
        """
        if name in self._pruned_names:
            if name + "_orig" in self._parameters:
                raise ValueError(
                    f"{name!r} of {type(self).__name__} is pruned, and computed from its original and a mask: call "
                    f"distprune.remove(module, {name!r}) before another parameter takes its place"
                )
            _forget_product(self, name)
        nn.Module.register_parameter(self, name, param)  # the module has another class now

    @override
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Write original and mask, or what others load: see ``plain_keys``.

        A mask that was made first, of a parameter that is sharded now, both without values yet (meta), is written in
        the parameter's layout. That is how its values have to come: Accelerate asks so with
        ``cpu_ram_efficient_loading``.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._pruned_names:
            original, mask = self._parameters.get(name + "_orig"), self._buffers[name + "_mask"]  # or FSDP1 has it
            if isinstance(original, DTensor) and mask is not None and mask.is_meta and not isinstance(mask, DTensor):
                local = torch.empty_like(original.to_local(), dtype=mask.dtype)
                destination[f"{prefix}{name}_mask"] = dtensor_like(original, local)
            if keys_are_plain.get():
                join_keys(destination, prefix + name)

    @override
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load original and mask, or what others have saved: see ``plain_keys``."""
        for name in self._pruned_names:
            take_plain_key(self, name, state_dict, prefix, errors=others[-1])
        before = {name: self._buffers[name + "_mask"] for name in self._pruned_names}
        super()._load_from_state_dict(state_dict, prefix, *others)
        for name, mask in before.items():
            original, now = self._parameters[name + "_orig"], self._buffers[name + "_mask"]
            if now is not mask and isinstance(original, DTensor) and isinstance(now, DTensor):  # assigned
                managed = Fsdp2Params().find(self, name + "_orig")
                reparametrize(self, name, dtensor_like(original, now.to_local().bool()), managed)


@functools.cache
def _class_with_products(base: type, names: frozenset[str]) -> type:
    """Return the subclass of ``base`` whose attributes ``names`` are products."""
    if not names and not issubclass(base, _Pruned):
        return base
    members = {
        **{name: _Product(name) for name in names},
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_pruned_base": base,
        "_pruned_names": names,
    }
    bases = (base,) if issubclass(base, _Pruned) else (_Pruned, base)  # pruned before FSDP2 made its own class
    return type(base.__name__, bases, members)


def _rebuild(base: type, names: tuple[str, ...]) -> Any:
    watch_savers()
    cls: Any = _class_with_products(base, frozenset(names))
    return cls.__new__(cls)


def _set_products(module: nn.Module, name: str, *, present: bool) -> None:
    above: Any = type(module)
    is_parametrization = is_parametrized(module) and vars(above).keys() & {*cast(Any, module).parametrizations}
    base: Any = above.__bases__[0] if is_parametrization else above  # torch's class stays above ours: it looks there
    names: frozenset[str] = frozenset()
    if "_pruned_names" in vars(base):
        base, names = base._pruned_base, base._pruned_names
    made = _class_with_products(base, names | {name} if present else names - {name})
    module.__class__ = type(above.__name__, (made,), dict(vars(above))) if is_parametrization else made


def reparametrize(module: nn.Module, name: str, mask: torch.Tensor, managed: Managed | None) -> None:
    """Turn ``name`` into the product of its original and ``mask``, replacing an earlier mask. Local.

    ``mask`` is in the parameter's layout. The caller registers the pre-hook.
    """
    watch_savers()
    original = name + "_orig"
    if original not in module._parameters:
        module.register_parameter(original, module._parameters.pop(name))
    module.__dict__.pop(name, None)
    module.register_buffer(name + "_mask", mask)
    _set_products(module, name, present=True)
    if DropProduct(name) not in module._forward_hooks.values():
        module.register_forward_hook(DropProduct(name), always_call=True)
    if managed is not None:
        rename(managed, original, masked=isinstance(mask, DTensor))
    if isinstance(module, nn.RNNBase):
        # Its own list of weights must not keep the original; the next forward puts the product there.
        module._flat_weights[module._flat_weights_names.index(name)] = None


@torch.no_grad()
def undo_reparametrization(module: nn.Module, name: str) -> None:
    """Write the product into the original and give it its old name: the pruning is permanent. Local."""
    managed = Fsdp2Params().release(module, name + "_orig")
    parameter = cast(nn.Parameter, module._parameters[name + "_orig"])
    mask = cast(torch.Tensor, module._buffers[name + "_mask"])
    if isinstance(parameter, DTensor):
        zero_where_pruned(parameter.to_local(), local_mask(parameter, mask).bool())
    else:
        parameter.data = product_of_hook(module, name).data
    del module._parameters[name + "_orig"], module._buffers[name + "_mask"]
    module._non_persistent_buffers_set.discard(name + "_mask")
    _forget_product(module, name)
    if managed is not None:
        rename(managed, name, masked=False)
    setattr(module, name, parameter)


def _forget_product(module: nn.Module, name: str) -> None:
    module.__dict__.pop(name, None)
    for key, hook in list(module._forward_hooks.items()):
        if hook == DropProduct(name):
            del module._forward_hooks[key]
            module._forward_hooks_always_called.pop(key, None)
    _set_products(module, name, present=False)
