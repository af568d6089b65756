"""Where the parameters of a model are now: wrappers, loading and moving replace them, and optimizers step them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from distprune.models.decoder_blocks import bare_model
from distprune.models.find_shards import Found
from distprune.pruning.agreement import NamedWeights
from distprune.shards.fsdp2 import Fsdp2Params
from distprune.shards.layouts import address_of, is_flattened, local_shard
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


def places_of(parameters: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return which ``parameters`` there are, and where their memory is: what a wrapper, a load or a move changes."""
    return [(id(parameter), address_of(parameter)) for parameter in parameters]


class WatchedWeights:
    """``weights``, looked for again only if their model has other parameters than before, or has them elsewhere."""

    def __init__(self, weights: NamedWeights) -> None:
        self.weights = weights
        self._found: Found | None = None
        self._places: list[tuple[int, int]] = []

    @override
    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_found": None}

    def find(self) -> Found:
        """Return this rank's parts of them. Local; raises as :meth:`NamedWeights.find`."""
        if self._found is None or self._places != places_of(self.weights.model.parameters()):
            self._found = self.weights.find()
            self._places = places_of(self.weights.model.parameters())  # some are put back to their shards
        return self._found


class Binding:
    """The parameters of a model that are, or will be, held on this rank, and the hooks that follow them.

    ``at_forward`` is called before the model is, ``at_gradient`` with a parameter's zeros as soon as its gradient is
    accumulated. ``trusts_loaded``: states that are loaded into the model are from a training like this one. The model's
    own hooks do not keep it alive, and are not copied with the model. No communication.
    """

    def __init__(
        self,
        weights: NamedWeights,
        at_forward: Callable[[], None],
        at_gradient: Callable[[Held], None],
        *,
        trusts_loaded: bool,
    ) -> None:
        self._weights = WatchedWeights(weights)
        self._left_out: frozenset[str] = frozenset()  # of what was found: the default follows from the whole model
        self._at_forward, self._at_gradient, self._trusts_loaded = at_forward, at_gradient, trusts_loaded
        self.has_begun = False
        self._start()

    def _start(self) -> None:
        """Begin with what no copy takes along."""
        self.shards: list[LocalShard] = []  # also what has no memory yet (meta)
        # What looks a parameter up, its name, the parameter, torch's object in it, what says where its memory is, and
        # where it was.
        self._there: list[tuple[Any, str, torch.Tensor, int, Callable[[], int], int]] = []
        self._frozen: list[torch.Tensor] = []  # of what is held: torch gives them no hook
        self._moved: dict[int, tuple[object, HeldTogether]] = {}  # by optimizer, with the parameters that it had
        self._model_hooks: list[RemovableHandle] = []
        self._part_hooks: list[RemovableHandle] = []  # of modules and parameters
        self._kept: object = None  # alive as long as one of the modules
        self.held: list[Held] = []  # nothing before it has begun
        self.together = HeldTogether([])  # all of them

    @override
    def __getstate__(self) -> dict[str, Any]:
        taken = ("_weights", "_left_out", "_at_forward", "_at_gradient", "_trusts_loaded", "has_begun")
        return {name: vars(self)[name] for name in taken}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()
        self.renew()
        self.trust(signs=True)

    @property
    def has_flat(self) -> bool:
        """Whether parameters are parts of flat ones (FSDP1), whose gradients have no hook."""
        return any(shard.tensor is None for shard in self.shards)

    def take(self, shards: Sequence[LocalShard]) -> None:
        """Take ``shards`` as what is to be held, and later what is in their ranges."""
        self._left_out = frozenset() if shards else frozenset(shard.name for shard in self._weights.find().shards)
        self.shards = list(shards)

    def begin(self, *, trusts_signs: bool) -> None:
        """Hold from here on. ``trusts_signs``: the weights are from a training like this one."""
        if not self.has_begun:
            self.has_begun = True
            self._bind(self.find())
            self.trust(signs=trusts_signs)

    def end(self) -> None:
        """Hold nothing until it begins again."""
        if self.has_begun:
            self.has_begun = False
            self._bind(self.find())

    def attach(self, kept: object = None) -> None:
        """Register the hooks: nothing has been changed before.

        The model and each module with a held weight keep ``kept`` alive, and no copy of them.
        """
        model, self._kept = self._weights.weights.model, kept
        self._model_hooks = [
            model.register_forward_pre_hook(Weak(self._at_forward, kept=kept), prepend=True),
            model.register_load_state_dict_post_hook(Weak(self._state_loaded)),
        ]
        self._watch()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in (*self._model_hooks, *self._part_hooks):
            handle.remove()
        self._model_hooks, self._part_hooks, self._kept = [], [], None

    def find(self, model: nn.Module | None = None) -> list[LocalShard]:
        """Return what is held as it is now, or its likes in another ``model``. Layers added since are held."""
        weights = self._weights if model is None else _in_copy(self._weights.weights, model)
        return [shard for shard in weights.find().shards if shard.name not in self._left_out]

    def moved_by(self, optimizer: Optimizer) -> HeldTogether:
        """Return what ``optimizer`` moves of what is held."""
        parameters = parameters_of(optimizer)
        key = places_of(parameters)
        known = self._moved.get(id(optimizer))
        if known is not None and known[0] == key:
            return known[1]
        if not in_backward():  # wrappers may have replaced parameters, something moved them, and layers may be new
            self.renew()
        moved = self._among(parameters)
        self._moved[id(optimizer)] = key, moved
        return moved

    def renew(self) -> None:
        """Take up the parameters as they are now, if they are others than before, or elsewhere."""
        shards = self.find()
        if shards != self.shards:
            self._bind(shards)

    def follow(self) -> None:
        """Take up parameters that were replaced, moved or unfrozen, before a forward. FSDP1's: before a step.

        ``Module.cuda()`` leaves the object as it is, and gives it other memory; that of a ``DTensor`` is swapped with
        another, and loses its hooks, also where nothing moves.
        """
        if any(tensor.requires_grad for tensor in self._frozen):
            self._watch()
        if all(
            get(name) is tensor and tensor._cdata == inner and address() == before
            for get, name, tensor, inner, address, before in self._there
        ):
            return
        swapped = {id(tensor) for _, _, tensor, inner, _, _ in self._there if tensor._cdata != inner}
        fsdp2, replaced = Fsdp2Params(), dict[str, LocalShard]()
        for shard in self.shards:
            now = _registered(shard)
            if shard.module is None or (now is not None and id(now) not in swapped and _is_at(now, shard)):
                continue
            managed = fsdp2.find(shard.module, shard.attribute)
            now = now if managed is None else managed.sharded  # it may be gathered at the moment
            if now is not None and (id(now) in swapped or not _is_at(now, shard)) and not is_flattened(now):
                replaced[shard.name] = local_shard(shard.name, now, shard.module, shard.attribute)
        if replaced:
            self._bind([replaced.get(shard.name, shard) for shard in self.shards])

    def trust(self, *, signs: bool) -> None:
        """Say whether the sign of a zero speaks in what is there now; otherwise zeros of both signs are held."""
        for held in self.held:
            held.may_be_foreign = not signs

    def _part_loaded(self, held: Held) -> None:
        held.may_be_foreign |= not self._trusts_loaded

    def _state_loaded(self) -> None:
        if not self._trusts_loaded:
            self.trust(signs=False)

    def _bind(self, shards: Sequence[LocalShard]) -> None:
        """Take ``shards`` as what is held, and remember which weights of each were zero."""
        before = {held.shard.name: held for held in self.held}
        if lost := sorted(before.keys() - {shard.name for shard in shards}):
            warnings.warn(
                f"{', '.join(map(repr, lost[:4]))} ({len(lost)} parameters) are held at zero no more: the model has no "
                "such weights now, or computes them (a parametrization); hold what is there now, by include",
                stacklevel=4,
            )
        self.shards, self.held = list(shards), []
        for shard in shards if self.has_begun else ():
            if shard.local.is_meta:
                continue
            is_masked = shard.module is not None and f"{shard.attribute}_mask" in shard.module._buffers
            known = held = before.get(shard.name)
            if held is None or held.shard.geometry != shard.geometry or held.zeros.device != shard.local.device:
                held = Held(shard)
                held.may_be_foreign = known is None or known.may_be_foreign
            elif held.shard.local.data_ptr() != shard.local.data_ptr():
                # remove() leaves a product, with zeros of both signs.
                held.may_be_foreign |= not self._trusts_loaded or (held.is_masked and not is_masked)
            held.shard, held.version, held.is_masked = shard, None, is_masked
            self.held.append(held)
        self.together = HeldTogether(self.held)
        self._there = [
            (module._parameters.get, shard.attribute, tensor, tensor._cdata, _asks(tensor), shard.local.data_ptr())
            for shard in shards
            if (tensor := shard.tensor) is not None and (module := shard.module) is not None
        ]
        self._moved.clear()
        if self._model_hooks:
            self._watch()

    def _watch(self) -> None:
        for handle in self._part_hooks:
            handle.remove()
        self._part_hooks, self._frozen = [], []
        for held in self.held:
            tensor, module = held.shard.tensor, held.shard.module  # no tensor: FSDP1
            if module is not None:
                hook = Weak(self._part_loaded, held, kept=self._kept)
                self._part_hooks.append(module.register_load_state_dict_post_hook(hook))  # type: ignore[no-untyped-call]
            if tensor is None or not tensor.is_leaf or not held.zeros.numel():
                continue
            if not tensor.requires_grad:
                self._frozen.append(tensor)
            else:
                hook = Weak(self._at_gradient, held)
                if tensor._post_accumulate_grad_hooks is not None:  # where torch has swapped it, it calls them again so
                    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
                self._part_hooks.append(tensor.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _among(self, parameters: Sequence[torch.Tensor]) -> HeldTogether:
        ranges = ranges_of([held.shard for held in self.held], parameters)
        pairs = [(held, where) for held, where in zip(self.held, ranges, strict=True) if where is not None]
        return HeldTogether([held for held, _ in pairs], [where for _, where in pairs])


class Weak:
    """Calls a method, with the arguments given here, as long as its object and they are alive; a copy calls nothing.

    A hook of a parameter that kept its arguments would keep the parameter: Python finds no cycles through tensors.
    ``kept`` lives as long as the hook.
    """

    def __init__(self, method: Any, *arguments: Any, kept: object = None) -> None:
        self._function, self._kept = method.__func__, kept
        self._arguments = [weakref.ref(argument) for argument in (method.__self__, *arguments)]

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or _transform() is not None:
            return  # what is compiled is not replaced, and what torch.func transforms has no memory to read
        arguments = [argument() for argument in self._arguments]
        if None not in arguments:
            self._function(*arguments)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {"_arguments": [type(None)]}  # as of an object that is gone


def _registered(shard: LocalShard) -> torch.Tensor | None:
    """Return what the shard's module has under its name now."""
    parameters = {} if shard.module is None else shard.module._parameters
    return parameters.get(shard.attribute, parameters.get(f"{shard.attribute}_orig"))


def _is_at(now: torch.Tensor, shard: LocalShard) -> bool:
    return now is shard.tensor and address_of(now) == shard.local.data_ptr()


def _asks(tensor: torch.Tensor) -> Callable[[], int]:
    """Return what returns the address of ``tensor``: for a plain one torch's own method, at a third of the time."""
    return tensor.data_ptr if type(tensor) is nn.Parameter else partial(address_of, tensor)


def _in_copy(weights: NamedWeights, model: nn.Module) -> NamedWeights:
    """Return what means in ``model``, a copy, what ``weights`` do in theirs: modules by their places."""
    bare, paths = bare_model(model), {module: path for path, module in bare_model(weights.model).named_modules()}
    include, exclude = (
        [name if isinstance(name, str) else bare.get_submodule(paths[name]) for name in names]
        for names in weights.patterns
    )
    return NamedWeights(model, include, exclude)
