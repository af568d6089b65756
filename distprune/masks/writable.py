"""The computed weight outside of forward: a tensor that notices when it is written into.

``module.weight`` of a reparametrized module is computed anew each time it is asked for. What is written into it would
vanish with it: ``module.weight.data += update`` (PEFT merges adapters so), ``module.weight.data = values``,
``module.weight.copy_(values)`` without gradients, ``torch.nn.init.normal_(module.weight)``. Here such a write goes
into the original. What is written where the mask is 0 is not kept: the zeros stay, and a warning says so.

Nouns: a *guard* is the tensor the user gets. It and all views of it share one *root*, the computed weight. An operation
on a guard is done on the plain tensor inside it. If the version of that has changed afterwards, it was written into.
A write that torch does not announce (by numpy, by a raw pointer) is not noticed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distprune.shards.layouts import is_laid_out_like, local_of
from distprune.shards.torch_private import private

_tree_map_only = private("torch.utils._pytree", "tree_map_only")
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Root:
    """The weight ``name`` of ``module`` as ``compute()`` gave it: ``values``."""

    module: nn.Module
    name: str
    values: torch.Tensor
    compute: Callable[[], torch.Tensor]

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Make ``values`` those of the original, and warn of what the mask does not keep. Local.

        Raises:
            RuntimeError: FSDP2 has the original gathered.
            TypeError: another shape, dtype or layout.
        """
        where = f"{self.name!r} of {type(self.module).__name__}"
        original = self.module.get_parameter(f"{self.name}_orig")
        if isinstance(self.module.get_buffer(f"{self.name}_mask"), DTensor) and not isinstance(original, DTensor):
            raise RuntimeError(f"{where} is gathered, and what is written into it would be lost: reshard it first")
        if (values.shape, values.dtype) != (original.shape, original.dtype) or (
            isinstance(original, DTensor) and not is_laid_out_like(values, original)
        ):
            raise TypeError(
                f"{where} is pruned, so only values of its shape {tuple(original.shape)}, dtype {original.dtype} and "
                f"layout can be written into it, not {tuple(values.shape)}, {values.dtype}"
            )
        local_of(original).copy_(local_of(values))
        if original.is_meta:
            return
        num_lost = int((local_of(self.compute()) != local_of(values)).sum())
        if num_lost:
            warnings.warn(
                f"{num_lost} of {values.numel()} values written into {where} are not kept, because it is pruned "
                f"there: its zeros stay. distprune.remove(module, {self.name!r}) before that would keep them.",
                stacklevel=5,  # past decorate_context, _call and __torch_function__
            )


class _Noticing:
    """What makes a tensor a guard."""

    _inside: torch.Tensor
    _root: _Root

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class _Guard(_Noticing, torch.Tensor):
    pass


class _ShardedGuard(_Noticing, DTensor):
    pass


def writable(module: nn.Module, name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return ``compute()``, the product ``name`` of ``module``, as a tensor that writes through to the original."""
    values = compute()
    if torch.compiler.is_compiling() or values.is_inference():
        return values
    return _guarded(values, _Root(module, name, values, compute))


def _guarded(inside: torch.Tensor, root: _Root) -> torch.Tensor:
    guard: Any = inside.view_as(inside)  # what does not ask for __torch_function__ gets the same values and gradients
    guard.__class__ = _ShardedGuard if isinstance(inside, DTensor) else _Guard
    guard._inside, guard._root = inside, root
    return guard  # type: ignore[no-any-return]


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    guards: list[Any] = []
    args, kwargs = _tree_map_only(torch.Tensor, lambda each: _opened(each, guards), (args, kwargs))
    if func == _SET_DATA and guards[0]._inside is args[0]:
        root: _Root = guards[0]._root
        if _storage(args[1]) != _storage(root.values):  # else an operation has written it already
            root.write(args[1])
        return None
    before = [(guard._inside._version, guard._inside.grad_fn) for guard in guards]
    result = func(*args, **kwargs)
    for guard, (version, graph) in zip(guards, before, strict=True):
        if guard._inside._version != version:
            if guard._inside is guard._root.values and guard._inside.grad_fn is not graph:
                raise RuntimeError(
                    f"{guard._root.name!r} of {type(guard._root.module).__name__} is pruned, and computed from a leaf "
                    "that requires grad: write into it within torch.no_grad()"
                )
            guard._root.write(guard._root.values)
            break
    return _tree_map_only(torch.Tensor, lambda each: _again(each, guards), result)


def _opened(tensor: torch.Tensor, guards: list[Any]) -> torch.Tensor:
    """Return what is inside ``tensor`` if it is a guard, and add it to ``guards``."""
    if not isinstance(tensor, _Noticing):
        return tensor
    guards.append(tensor)
    return tensor._inside


def _again(result: torch.Tensor, guards: list[Any]) -> torch.Tensor:
    """Return a ``result`` that is what is inside a guard, or a view of it, as a guard."""
    for guard in guards:
        if result is guard._inside:
            return guard  # type: ignore[no-any-return]
        if _storage(result) == _storage(guard._inside):
            return _guarded(result, guard._root)
    return result


def _storage(tensor: torch.Tensor) -> int:
    """Return what tells the memory of strided ``tensor`` on this rank from others'; of others a new number."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()._cdata if local.layout is torch.strided else id(local)
