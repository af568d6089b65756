"""The contract of ``torch.nn.utils.prune``, in any layout: methods, a container of them, and calls on parameters."""

from __future__ import annotations

import dataclasses
import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, Group, communicator
from distprune.masks.reparametrized import product, reparametrize, undo_reparametrization
from distprune.models.find_shards import Found
from distprune.patterns.base import Pattern, Ranked, Scope
from distprune.pruning.agreement import Agreed, agreeing, choose_masks, fitted
from distprune.pruning.torch_api.targets import Hook, Pairs, Scores, Target, as_floats, facts, find_targets, plain
from distprune.pruning.torch_api.users_mask import check_type, mask_by_user, masks_by_users, pruning_type
from distprune.scores.base import LocalScores, Score
from distprune.shards.layouts import dtensor_like, is_held, local_of, local_part, local_shard
from distprune.shards.local_shard import LocalShard
from distprune.shards.parts import check_parts


class BasePruningMethod(torch_prune.BasePruningMethod):
    """Base of all pruning methods; see ``torch.nn.utils.prune.BasePruningMethod``.

    >>> class Small(BasePruningMethod):
    ...     PRUNING_TYPE = "unstructured"
    ...     def compute_mask(self, t, default_mask):
    ...         return default_mask * (t.abs() >= 0.1)
    >>> layer = torch.nn.Linear(4, 4)
    >>> _ = Small.apply(layer, "weight")
    >>> bool((layer.weight_mask == (layer.weight_orig.abs() >= 0.1)).all())
    True

    A subclass sets ``PRUNING_TYPE`` (``"unstructured"``, ``"structured"`` or ``"global"``) and writes
    ``compute_mask``. On plain modules that is called as PyTorch calls it. On sharded ones ``t`` and
    ``default_mask`` are DTensors in the parameter's layout, and what is returned must be one too: work
    elementwise (``default_mask * (t.abs() >= 0.1)``). What ranks elements against each other belongs in
    the importance scores of :class:`distprune.L1Unstructured`.
    """

    PRUNING_TYPE: ClassVar[str]

    @override
    def apply_mask(self, module: nn.Module) -> torch.Tensor:
        """Return the product of mask and original, in the original's layout. No communication.

        Raises:
            AssertionError: the method has not been applied to a parameter.
        """
        if getattr(self, "_tensor_name", None) is None:
            raise AssertionError(f"Module {module} has to be pruned")
        return product(module, self._tensor_name)

    @classmethod
    @override
    def apply(
        cls,
        module: nn.Module,
        name: str,
        *args: Any,
        importance_scores: torch.Tensor | None = None,
        group: Group = None,
        **kwargs: Any,
    ) -> torch_prune.BasePruningMethod:
        """Prune ``name`` in ``module`` by this method and return its hook: the method, or a container of all so far.

        Every rank of ``group`` must call it, with its own part of the same module. ``args`` and
        ``kwargs`` go to the constructor. ``importance_scores``: of the global shape, plain and whole, or
        a DTensor in the parameter's layout. Rounds: one to agree, those of the method, one at the end.

        Raises:
            AssertionError: scores or a mask of another shape.
            AttributeError: ``name`` is no attribute of ``module``.
            TypeError: ``name`` is no parameter, or the method's own.
            ValueError: ranks disagree, NaN scores, a layout that cannot be brought over, or the method's own.
            NotImplementedError: FSDP1, ``Partial``, a parameter FSDP2 shares between modules, or a
                ``compute_mask`` that does not work on shards.
        """
        scores = None if importance_scores is None else {(module, name): importance_scores}
        return prune_pairs(communicator(group), lambda: [(module, name)], lambda: cls(*args, **kwargs), scores)[0]

    @override
    def remove(self, module: nn.Module) -> None:
        """Make the pruning of ``module`` permanent, and the parameter what it was, under its old name. Local.

        The hook itself stays registered, as in PyTorch; :func:`distprune.remove` takes it out too.

        Raises:
            AssertionError: the method has not been applied to a parameter.
        """
        name = getattr(self, "_tensor_name", None)
        if name is None:
            raise AssertionError(f"Module {module} has to be pruned before pruning can be removed")
        undo_reparametrization(module, name)


def apply_of(theirs: type[Hook], *more: str) -> Any:
    """Return ``apply`` with the arguments of one of PyTorch's classes, ``group``, and ``more`` of the constructor's."""
    signature = inspect.signature(theirs.apply)

    def apply(cls: type[BasePruningMethod], /, *args: Any, group: Group = None, **kwargs: Any) -> Hook:
        own = {name: kwargs.pop(name) for name in kwargs.keys() - signature.parameters.keys()}
        given = signature.bind(*args, **kwargs).arguments
        return cast(Any, BasePruningMethod.apply).__func__(cls, **given, **own, group=group)  # type: ignore[no-any-return]

    first = inspect.Parameter("cls", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in (*more, "group")]
    shown = signature.replace(parameters=[first, *signature.parameters.values(), *own])
    vars(apply).update(__signature__=shown, __doc__=BasePruningMethod.apply.__doc__)
    return classmethod(apply)


class Selecting(BasePruningMethod):
    """A method of this library: a pattern and a score, which decide on the shards of many parameters at once."""

    PRUNING_TYPE = "unstructured"

    @abstractmethod
    def rule(self) -> tuple[Pattern | None, Score]:
        """Return the pattern and the score. Without a pattern all stays."""

    @property
    def selects(self) -> bool:
        """Whether no subclass computes masks in its own way."""
        return type(self).compute_mask is Selecting.compute_mask

    def choose(
        self,
        agreed: Agreed,
        make_scores: Callable[[], list[LocalScores]],
        scope: Scope = "tensor",
        then: Callable[[Sequence[torch.Tensor]], object] = len,
    ) -> list[torch.Tensor]:
        """Return what stays of each shard (bool), and let ``then`` work on it. Every rank must call it."""
        pattern, _ = self.rule()
        if pattern is None:
            with together(agreed.comm):
                masks = [torch.ones_like(scores.shard.local, dtype=torch.bool) for scores in make_scores()]
                then(masks)
            return masks
        if pattern.has_scope or scope == "global":
            pattern = pattern.within(scope)
        ranked = Ranked(agreed.comm, agreed.roster, agreed.score, make_scores, of_left=True)
        return choose_masks(ranked, ranked.choose(pattern), then)[0]

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """Return ``default_mask`` with what the method prunes of ``t`` set to zero, all of ``t`` competing. Local.

        Raises:
            NotImplementedError: ``t`` is a DTensor.
        """
        return self.mask_among(t, default_mask, None)

    def mask_among(self, t: torch.Tensor, default_mask: torch.Tensor, left: torch.Tensor | None) -> torch.Tensor:
        """Return ``default_mask`` times what is kept among the elements that are ``left`` (bool)."""
        if isinstance(t, DTensor):
            raise NotImplementedError(
                f"{type(self).__name__} prunes a DTensor as the parameter of a module: use its apply(module, name, ...)"
            )
        dtype = t.dtype if pruning_type(self) == "structured" else default_mask.dtype
        pattern, score = self.rule()
        shard = local_shard("0.t", as_floats(t))
        shard = shard if pattern is None else fitted(pattern, shard, "t")
        with agreeing(Alone()) as agreed:
            agreed.found, agreed.score = Found([shard]), score

        def make_scores() -> list[LocalScores]:
            return [LocalScores(shard, agreed.score, {}, left, counts_gone=True) for shard in agreed.shards()]

        (mask,) = self.choose(agreed, make_scores)
        return (default_mask * mask.to(default_mask.dtype)).to(dtype)


class PruningContainer(BasePruningMethod, torch_prune.PruningContainer):
    """The methods applied to one parameter, in order; see ``torch.nn.utils.prune.PruningContainer``.

    >>> layer = l1_unstructured(torch.nn.Linear(4, 4), "weight", 0.25)
    >>> (container,) = ln_structured(layer, "weight", 1, n=2, dim=0)._forward_pre_hooks.values()
    >>> [type(method).__name__ for method in container]
    ['L1Unstructured', 'LnStructured']
    """

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """Return ``default_mask`` with the latest method's mask on top, computed on what was left of ``t``.

        ``"unstructured"`` methods see the elements that are left, ``"structured"`` the channels, ``"global"`` all.

        Raises:
            ValueError: an unknown ``PRUNING_TYPE``.
            AttributeError: a structured method without ``dim``.
        """
        method = self._pruning_methods[-1]
        check_type(method)
        if not isinstance(method, Selecting) or not method.selects:
            return mask_by_user(method, t, default_mask, again=True)
        kind, left = pruning_type(method), default_mask == 1
        if kind != "unstructured":
            among = None if kind == "global" else default_mask != 0
            return method.mask_among(t, default_mask, among).to(t.dtype)
        return torch.where(left, method.mask_among(t, default_mask, left), default_mask).to(t.dtype)


class CustomFromMask(BasePruningMethod):
    """Prunes by a given ``mask``. See ``torch.nn.utils.prune.CustomFromMask``.

    >>> CustomFromMask(torch.tensor([1, 0])).prune(torch.tensor([1.0, 2.0]))
    tensor([1., 0.])

    For a sharded parameter the mask is of zeros and ones: plain and whole on every rank, or a DTensor in
    the parameter's layout. Once applied, ``mask`` is the parameter's own, and ``None`` when another one is in place:
    a module keeps one mask, however often it is pruned.
    """

    PRUNING_TYPE = "global"
    apply = apply_of(torch_prune.CustomFromMask)

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask: torch.Tensor | None = mask

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        assert self.mask is not None  # not applied yet
        if default_mask.shape != self.mask.shape:
            raise AssertionError(
                f"default_mask shape {default_mask.shape} must match self.mask shape {self.mask.shape}"
            )
        if self.mask.requires_grad:
            raise NotImplementedError("a mask is not learned here: give mask.detach(), or multiply the weight by it")
        shard = local_shard("mask", default_mask) if is_held(default_mask) else None
        mask = local_part(self.mask, default_mask, shard, "mask")
        if isinstance(default_mask, DTensor):
            return default_mask * dtensor_like(default_mask, mask)
        return default_mask * mask.to(default_mask.dtype)


def prune_pairs(
    comm: Communicator,
    make_pairs: Callable[[], Pairs],
    make_method: Callable[[], Hook],
    scores: Scores | None,
    *,
    scope: Scope = "tensor",
) -> list[Hook]:
    """Prune all that ``make_pairs`` returns, each by a new method, and return their hooks. Every rank must call it.

    ``scope``: whether each competes by itself, or all together. Then the hooks are of the masks that were decided,
    as in PyTorch. Rounds: one to agree, those of the method, and one at the end, of 16 bytes a parameter. Nothing is
    changed before all ranks have decided.
    """

    with agreeing(comm) as agreed:
        pairs = make_pairs()
        methods = [make_method() for _ in pairs]
        targets = find_targets(pairs, scores)
        for target, method in zip(targets, methods, strict=True):
            _check_fits(target, method, scope)
        if targets and comm.size > 1:
            agreed.facts = facts(targets, plain(methods[0]), scores)
        if methods and isinstance(methods[0], Selecting):
            agreed.score = methods[0].rule()[1]
        held = [target for target in targets if target.shard is not None]
        agreed.found = Found([target.shard for target in held if target.shard is not None])
    if not targets:
        return []
    method, kind, masks = methods[0], pruning_type(methods[0]), list[torch.Tensor]()

    def make_scores() -> list[LocalScores]:
        shards = zip(held, agreed.shards(), strict=True)
        return [target.scores_of(shard, kind, agreed.score) for target, shard in shards]

    def combine(chosen: Sequence[torch.Tensor]) -> None:
        keep = {target.label: mask for target, mask in zip(held, chosen, strict=True)}
        masks.extend(target.next_mask(keep.get(target.label), kind) for target in targets)

    def compute() -> list[LocalShard]:
        masks[:] = masks_by_users(targets, methods, over_all=scope == "global")
        local = [local_of(mask) for target, mask in zip(targets, masks, strict=True) if target.shard is not None]
        shards = zip(agreed.shards(), local, strict=True)
        return [dataclasses.replace(shard, local=mask.reshape(shard.local.shape)) for shard, mask in shards]

    if isinstance(method, Selecting) and method.selects:
        method.choose(agreed, make_scores, scope, combine)
    else:
        check_parts(comm, agreed.roster, compute)  # replicas must have the same
    if scope == "global":
        methods = [CustomFromMask(mask) for mask in masks]
    return [place(*change) for change in zip(targets, masks, methods, strict=True)]


def _check_fits(target: Target, method: Hook, scope: Scope) -> None:
    """Check that ``method`` can prune ``target``, and tell each what it has to know of the other. Local."""
    method._tensor_name = target.name
    if scope == "global" and pruning_type(method) != "unstructured":
        raise TypeError(
            'Only "unstructured" PRUNING_TYPE supported for the `pruning_method`. Found method '
            f"{type(method).__name__} of type {pruning_type(method)}"
        )
    if target.old_hooks:
        check_type(method)
    pattern = method.rule()[0] if isinstance(method, Selecting) else None
    if pattern is not None and target.shard is not None:
        target.shard = fitted(pattern, target.shard, target.name)
    standard = (BasePruningMethod.apply_mask, torch_prune.BasePruningMethod.apply_mask)
    if type(method).apply_mask not in standard and target.managed is not None:
        raise NotImplementedError(
            f"{type(method).__name__}.apply_mask is its own; under FSDP2 the mask is multiplied into the shard "
            "before it is gathered, so only the standard product works there"
        )


def place(target: Target, mask: torch.Tensor, method: Hook | None) -> Hook:
    """Put the next ``mask`` in place, in the parameter's layout, and return the hook; only the latest method keeps one.

    ``method`` made it; ``None``: it was there. Local, and nothing but entries of dicts, so that no rank can fail.
    """
    hook = next(iter(target.old_hooks.values()), None)
    methods: list[Hook] = [] if hook is None else [hook]
    if isinstance(hook, torch_prune.PruningContainer):
        methods = [*hook]
    if method is not None:
        method._tensor_name = target.name
        methods.append(method)
    if isinstance(hook, PruningContainer):
        hook._pruning_methods = tuple(methods)
    elif len(methods) == 1 and isinstance(methods[0], BasePruningMethod):
        hook = methods[0]
    else:  # methods of PyTorch's own go into a container of ours, which knows the layouts
        hook = PruningContainer()
        hook._tensor_name, hook._pruning_methods = target.name, tuple(methods)
    for key in target.old_hooks:
        del target.module._forward_pre_hooks[key]
    reparametrize(target.module, target.name, mask, target.managed)
    target.module.register_forward_pre_hook(hook)
    for part in methods:
        if isinstance(part, CustomFromMask):
            part.mask = mask if part is methods[-1] else None
    return hook
