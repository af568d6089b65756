"""The contract of ``torch.nn.utils.prune``, in any layout: methods, a container of them, and calls on parameters."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.collectives.agree import together
from distprune.collectives.alone import Alone
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.masks.reparametrized import product, undo_reparametrization
from distprune.models.find_shards import Found
from distprune.patterns.base import Chosen, Pattern, Ranked, Scope
from distprune.patterns.census import check_parts
from distprune.pruning.agreement import Agreed, Facts, agree_on
from distprune.pruning.fitting import fitted
from distprune.pruning.torch_api.commit import Change, Decision, commit
from distprune.pruning.torch_api.targets import (
    Hook,
    Pairs,
    Scores,
    Target,
    described,
    facts,
    find_targets,
    next_mask,
    scores_of,
)
from distprune.pruning.torch_api.users_mask import check_type, mask_by_user, masks_by_users, pruning_type
from distprune.scores.base import LocalScores, Score
from distprune.scores.magnitude import Magnitude
from distprune.shards.layouts import dtensor_like, is_held, local_of, local_part, local_shard
from distprune.shards.local_shard import LocalShard


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


class Selecting(BasePruningMethod):
    """A method of this library: a pattern and a score, which decide on the shards of many parameters at once."""

    PRUNING_TYPE = "unstructured"

    @abstractmethod
    def rule(self) -> tuple[Pattern, Score]:
        """Return the pattern and the score."""

    @property
    def is_overridden(self) -> bool:
        """Whether a subclass computes masks in its own way."""
        return type(self).compute_mask is not Selecting.compute_mask

    def choose(
        self, agreed: Agreed, make_scores: Callable[[], list[LocalScores]], scope: Scope
    ) -> Callable[[], list[Chosen]]:
        """Return a function that returns what was chosen from each of the scores. Every rank must call it."""
        pattern, _ = self.rule()
        if pattern.has_scope or scope == "global":
            pattern = pattern.within(scope)
        ranked = Ranked(agreed.comm, agreed.roster, agreed.score, make_scores, of_left=True)
        choice = ranked.choose(pattern)
        return lambda: choice.masks(ranked.scores)

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """Return ``default_mask`` with what the method prunes of ``t`` set to zero, all of ``t`` competing.

        Where ``t`` is a DTensor, every rank of the default group must call it; the mask is a DTensor then.
        """
        return self.mask_among(t, default_mask, None)

    def mask_among(self, t: torch.Tensor, default_mask: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
        """Return ``default_mask`` times what is kept among the elements at which ``earlier`` is not zero."""
        comm = communicator() if isinstance(t, DTensor) else Alone()
        dtype = t.dtype if pruning_type(self) == "structured" else default_mask.dtype
        t = t if t.is_floating_point() else t.double()

        def look() -> tuple[Found, Facts, Score, None]:
            pattern, score = self.rule()
            shards = [fitted(pattern, local_shard("0.t", t), "t")] if is_held(t) else []
            found = Found(shards, [], by_default=False, has_blocks=False)
            return found, {"method": described(self)}, score, None

        agreed, _ = agree_on(comm, look)
        left = None if earlier is None else local_of(earlier).bool()
        settle = self.choose(
            agreed,
            lambda: [LocalScores(s, agreed.score, {}, left, counts_gone=True) for s in agreed.shards()],
            "tensor",
        )
        chosen: list[Chosen] = []

        def decide() -> Decision:
            chosen[:] = settle()
            return [], {"t": sum(each.num_nans for each in chosen)}

        commit(comm, decide)
        if not isinstance(t, DTensor):
            return (default_mask * chosen[0].mask.to(default_mask.dtype)).to(dtype)
        return default_mask * dtensor_like(t, chosen[0].mask if chosen else t.to_local().bool())


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
        if isinstance(method, Selecting) and not method.is_overridden:
            kind = pruning_type(method)
            left = {"unstructured": default_mask == 1, "structured": default_mask != 0}
            mask = method.mask_among(t, default_mask, left.get(kind))
            if isinstance(t, DTensor):
                return mask
            return (mask if kind != "unstructured" else torch.where(default_mask == 1, mask, default_mask)).to(t.dtype)
        return mask_by_user(method, t, default_mask, again=True)


class CustomFromMask(BasePruningMethod):
    """Prunes by a given ``mask``. See ``torch.nn.utils.prune.CustomFromMask``.

    >>> CustomFromMask(torch.tensor([1, 0])).prune(torch.tensor([1.0, 2.0]))
    tensor([1., 0.])

    For a sharded parameter the mask is of zeros and ones: plain and whole on every rank, or a DTensor in
    the parameter's layout. Once applied, ``mask`` is the parameter's own, and ``None`` when another one is in place:
    a module keeps one mask, however often it is pruned.
    """

    PRUNING_TYPE = "global"

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask: torch.Tensor | None = mask

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        assert self.mask is not None  # not applied yet
        if default_mask.shape != self.mask.shape:
            raise AssertionError(
                f"default_mask shape {default_mask.shape} must match self.mask shape {self.mask.shape}"
            )
        shard = local_shard("mask", default_mask) if is_held(default_mask) else None
        mask = local_part(self.mask, default_mask, shard, "mask")
        if isinstance(default_mask, DTensor):
            return default_mask * dtensor_like(default_mask, mask)
        return default_mask * mask.to(default_mask.dtype)

    @classmethod
    @override
    def apply(  # type: ignore[override]
        cls, module: nn.Module, name: str, mask: torch.Tensor, *, group: Group = None
    ) -> torch_prune.BasePruningMethod:
        return super().apply(module, name, mask=mask, group=group)


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
    as in PyTorch. Rounds: one to agree, those of the method, and one at the end, of 16 bytes. If something fails there,
    every rank undoes its changes.
    """

    def look() -> tuple[Found, Facts, Score, tuple[list[Target], list[Hook]]]:
        pairs = make_pairs()
        methods = [make_method() for _ in pairs]
        targets = find_targets(pairs, scores)
        for target, method in zip(targets, methods, strict=True):
            _check_fits(target, method, scope)
        shards = [shard for target in targets if (shard := target.ranked) is not None]
        own_facts = facts(comm, targets, described(methods[0]), scores) if targets else {}
        score = methods[0].rule()[1] if methods and isinstance(methods[0], Selecting) else Magnitude()
        return Found(shards, [], by_default=False, has_blocks=False), own_facts, score, (targets, methods)

    agreed, (targets, methods) = agree_on(comm, look)
    if not targets:
        return []
    if isinstance(methods[0], Selecting) and not methods[0].is_overridden:
        settle = _selected(agreed, targets, methods[0], scope)
    else:
        settle = _computed(agreed, targets, methods, over_all=scope == "global")

    def decide() -> Decision:
        masks, num_nans = settle()
        hooks = [CustomFromMask(mask) for mask in masks] if scope == "global" else methods
        return [changed(*each) for each in zip(targets, masks, hooks, strict=True)], num_nans

    return put_in_place(comm, decide)


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
    if isinstance(method, Selecting) and target.shard is not None:
        target.shard = fitted(method.rule()[0], target.shard, target.name)
    standard = (BasePruningMethod.apply_mask, torch_prune.BasePruningMethod.apply_mask)
    if type(method).apply_mask not in standard and target.managed is not None:
        raise NotImplementedError(
            f"{type(method).__name__}.apply_mask is its own; under FSDP2 the mask is multiplied into the shard "
            "before it is gathered, so only the standard product works there"
        )


_Masks = tuple[list[torch.Tensor], dict[str, int]]  # of all targets; NaNs in this rank's scores, by label


def _selected(agreed: Agreed, targets: Sequence[Target], method: Selecting, scope: Scope) -> Callable[[], _Masks]:
    """Let a method of this library select. Every rank must call it; what is returned is local."""
    kind = pruning_type(method)
    held = [target for target in targets if target.shard is not None]

    def make_scores() -> list[LocalScores]:
        return [scores_of(t, shard, kind, agreed.score) for t, shard in zip(held, agreed.shards(), strict=True)]

    settle = method.choose(agreed, make_scores, scope)

    def masks() -> _Masks:
        chosen = {target.label: each for target, each in zip(held, settle(), strict=True)}
        keep = {label: each.mask for label, each in chosen.items()}
        nans = {label: each.num_nans for label, each in chosen.items()}
        return [next_mask(target, keep.get(target.label), kind) for target in targets], nans

    return masks


def _computed(
    agreed: Agreed, targets: Sequence[Target], methods: Sequence[Hook], *, over_all: bool
) -> Callable[[], _Masks]:
    """Let users' own methods compute the masks, and check that replicas get equal ones. Every rank must call it."""
    masks: list[torch.Tensor] = []
    with together(agreed.comm):
        masks = masks_by_users(targets, methods, over_all=over_all)

    def shards() -> list[LocalShard]:
        held = [local_of(mask) for target, mask in zip(targets, masks, strict=True) if target.shard is not None]
        return [
            dataclasses.replace(shard, local=mask.reshape(shard.local.shape))
            for shard, mask in zip(agreed.shards(), held, strict=True)
        ]

    if agreed.comm.size > 1:
        check_parts(agreed.comm, agreed.roster, shards)
    return lambda: (masks, {})


def put_in_place(comm: Communicator, decide: Callable[[], Decision]) -> list[Hook]:
    """Do what :func:`commit` does, return the hooks, and let none of their methods but the latest keep a mask."""
    changes = commit(comm, decide)
    for change in changes:
        if isinstance(change.hook, PruningContainer) and change.added is not None:
            change.hook.add_pruning_method(change.added)
        methods = flattened(change.hook)
        for method in methods:
            if isinstance(method, CustomFromMask):
                method.mask = change.mask if method is methods[-1] else None
    return [change.hook for change in changes]


def changed(target: Target, mask: torch.Tensor, method: Hook) -> Change:
    """Return the change to ``mask``, with the method as hook, or a container of it and of the methods before it."""
    method._tensor_name = target.name
    old = next(iter(target.old_hooks.values()), None)
    if isinstance(old, PruningContainer):
        return Change(target, mask, old, added=method)
    if old is None and isinstance(method, BasePruningMethod):
        return Change(target, mask, method)
    # A method of PyTorch's own goes into a container of ours, which knows the layouts.
    earlier = [] if old is None else flattened(old)
    return Change(target, mask, contained(target.name, [*earlier, method]))


def flattened(hook: Hook) -> list[Hook]:
    """Return the methods of a container, or the one method."""
    return list(hook) if isinstance(hook, torch_prune.PruningContainer) else [hook]


def contained(name: str, methods: Sequence[Hook]) -> PruningContainer:
    """Return a container of ``methods``, which act on ``name``."""
    container = PruningContainer()
    container._tensor_name = name
    for method in methods:
        container.add_pruning_method(method)
    return container
