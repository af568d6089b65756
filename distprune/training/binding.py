"""Where the parameters of a model are now: wrappers, loading and moving replace them, and optimizers step them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from distprune.models.find_shards import NamePattern, find_shards
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.layouts import is_flattened, local_of, local_shard
from distprune.shards.local_shard import LocalShard
from distprune.shards.parameter_range import ranges_of
from distprune.shards.torch_private import private
from distprune.training.held import Held, HeldTogether
from distprune.training.optimizers import parameters_of

_backward_task = private("torch._C", "_current_graph_task_id")
_transform = private("torch._C._functorch", "peek_interpreter_stack")


def in_backward() -> bool:
    """Return whether the caller runs within a backward pass, where ranks are not in step."""
    return bool(_backward_task() != -1)


class Binding:
    """The held parameters of a model on this rank, and the hooks that follow them. No communication.

    ``at_forward`` is called before the model is, ``at_gradient`` with a parameter's zeros as soon as its gradient is
    accumulated. ``trusts_loaded``: states
    that are loaded into the model are from a training like this one. The model's own hooks do not keep it alive, and
    are not copied with the model.
    """

    def __init__(
        self,
        model: nn.Module,
        include: NamePattern | Sequence[NamePattern],
        exclude: NamePattern | Sequence[NamePattern],
        at_forward: Callable[[], None],
        at_gradient: Callable[[Held], None],
        trusts_loaded: bool,
    ) -> None:
        self._model, self._include, self._exclude = model, include, exclude
        self._left_out: frozenset[str] = frozenset()  # of what was found: the default follows from the whole model
        self._at_forward, self._at_gradient, self._trusts_loaded = at_forward, at_gradient, trusts_loaded
        self._shards: list[LocalShard] = []  # also what has no memory yet (meta)
        self._moved: dict[int, tuple[object, HeldTogether]] = {}  # by optimizer, with the parameters that it had
        self._model_hooks: list[RemovableHandle] = []
        self._gradient_hooks: list[RemovableHandle] = []
        self.held: list[Held] = []
        self.together = HeldTogether([])  # all of them

    @property
    def names(self) -> frozenset[str]:
        """The names of what is held."""
        return frozenset(shard.name for shard in self._shards)

    @property
    def has_flat(self) -> bool:
        """Whether parameters are parts of flat ones (FSDP1), whose gradients have no hook."""
        return any(held.shard.tensor is None for held in self.held)

    def take(self, shards: Sequence[LocalShard]) -> list[LocalShard]:
        """Hold ``shards``, and later what is in their ranges. Return those that have values."""
        self._left_out = frozenset() if shards else frozenset(shard.name for shard in self._found(self._model))
        self._bind(shards)
        return [held.shard for held in self.held]

    def attach(self) -> None:
        """Register the hooks: nothing has been changed before."""
        self._model_hooks = [
            self._model.register_forward_pre_hook(Weak(self._at_forward), prepend=True),
            self._model.register_load_state_dict_post_hook(Weak(self._state_loaded)),  # type: ignore[no-untyped-call]
        ]
        self._watch()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in (*self._model_hooks, *self._gradient_hooks):
            handle.remove()
        self._model_hooks, self._gradient_hooks = [], []

    def find(self, model: nn.Module | None = None) -> list[LocalShard]:
        """Return what is held as it is now, or its likes in another ``model``. Layers added since are held."""
        found = self._found(self._model if model is None else model)
        return [shard for shard in found if shard.name not in self._left_out]

    def moved_by(self, optimizer: Optimizer) -> HeldTogether:
        """Return what ``optimizer`` moves of what is held."""
        parameters = parameters_of(optimizer)
        key = [(id(parameter), local_of(parameter).data_ptr()) for parameter in parameters]
        known = self._moved.get(id(optimizer))
        if known is not None and known[0] == key:
            return known[1]
        moved = self._among(parameters)
        # Wrappers may have replaced the parameters, something their memory, and layers may have been added.
        if (not moved.held or known is not None) and not in_backward():
            self.renew()
            moved = self._among(parameters)
        self._moved[id(optimizer)] = key, moved
        return moved

    def renew(self) -> None:
        """Take up the parameters as they are now."""
        self._bind(self.find())

    def follow(self) -> None:
        """Take up parameters that were replaced, before a forward. FSDP1's are taken up before a step."""
        replaced = [shard for shard in self._shards if _registered(shard) is not shard.tensor]
        fsdp2 = Fsdp2Params() if replaced else None
        moved: dict[str, LocalShard] = {}
        for shard in replaced:
            # What FSDP2 manages may be gathered at the moment.
            managed = fsdp2.find(shard.module, shard.attribute) if fsdp2 is not None and shard.module else None
            tensor = _registered(shard) if managed is None else managed.sharded
            if tensor is not None and tensor is not shard.tensor and not is_flattened(tensor):
                moved[shard.name] = local_shard(shard.name, tensor, shard.module, shard.attribute)
        if moved:
            self._bind([moved.get(shard.name, shard) for shard in self._shards])

    def trust(self, *, signs: bool) -> None:
        """Say whether the sign of a zero speaks in what is there now; otherwise zeros of both signs are held."""
        for held in self.held:
            held.may_be_foreign = not signs

    def _state_loaded(self) -> None:
        if not self._trusts_loaded:
            self.trust(signs=False)

    def _bind(self, shards: Sequence[LocalShard]) -> None:
        """Take ``shards`` as what is held, and remember which weights of each were zero."""
        before = {held.shard.name: held for held in self.held}
        self._shards, self.held = list(shards), []
        for shard in shards:
            if shard.local.is_meta:
                continue
            known = held = before.get(shard.name)
            if held is None or held.shard.geometry != shard.geometry or held.mask.device != shard.local.device:
                held = Held(shard)
                held.may_be_foreign = known is None or known.may_be_foreign
            elif held.shard.local.data_ptr() != shard.local.data_ptr():
                held.may_be_foreign |= not self._trusts_loaded  # as remove() leaves a product, with zeros of both signs
            held.move(shard)
            self.held.append(held)
        self.together = HeldTogether(self.held)
        self._moved.clear()
        if self._model_hooks:
            self._watch()

    def _found(self, model: nn.Module) -> list[LocalShard]:
        return find_shards(model, self._include, self._exclude).shards

    def _watch(self) -> None:
        for handle in self._gradient_hooks:
            handle.remove()
        self._gradient_hooks = []
        for held in self.held:
            tensor = held.shard.tensor  # None: FSDP1
            if tensor is not None and tensor.requires_grad and tensor.is_leaf:
                hook = Weak(self._at_gradient, held)
                self._gradient_hooks.append(tensor.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _among(self, parameters: Sequence[torch.Tensor]) -> HeldTogether:
        ranges = ranges_of([held.shard for held in self.held], parameters)
        pairs = [(held, where) for held, where in zip(self.held, ranges, strict=True) if where is not None]
        return HeldTogether([held for held, _ in pairs], [where for _, where in pairs])


class Weak:
    """Calls a method, with the arguments given here, as long as its object and they are alive; a copy calls nothing.

    A hook of a parameter that kept its arguments would keep the parameter: Python finds no cycles through tensors.
    """

    def __init__(self, method: Callable[..., None] | None, *arguments: Any) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)
        self._arguments = [weakref.ref(argument) for argument in arguments]

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or _transform() is not None:
            return  # what is compiled is not replaced, and what torch.func transforms has no memory to read
        method = None if self._method is None else self._method()
        arguments = [argument() for argument in self._arguments]
        if method is not None and None not in arguments:
            method(*arguments)

    @override
    def __reduce__(self) -> Any:
        return Weak, (None,)


def _registered(shard: LocalShard) -> torch.Tensor | None:
    """Return what the shard's module has under its name now."""
    parameters = {} if shard.module is None else shard.module._parameters
    return parameters.get(shard.attribute, parameters.get(f"{shard.attribute}_orig"))
