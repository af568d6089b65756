"""The contract of ``torch.nn.utils.prune``, in any layout: methods, a container of them, and calls on parameters."""

from __future__ import annotations

import dataclasses
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.collectives.agree import max_together
from distprune.collectives.alone import Alone
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.masks.reparametrized import product, reparametrize, undo_reparametrization
from distprune.models.find_shards import Found
from distprune.patterns.base import Chosen, Pattern, Ranked, Scope
from distprune.patterns.census import check_parts
from distprune.pruning.agreement import Agreed, Facts, agree_on
from distprune.pruning.fitting import fitted
from distprune.pruning.torch_api.targets import Hook, Pairs, Scores, Target, facts, find_targets, plain
from distprune.pruning.torch_api.users_mask import check_type, mask_by_user, masks_by_users, pruning_type
from distprune.scores.base import LocalScores, Score
from distprune.scores.magnitude import Magnitude
from distprune.selection.kth_value import raise_nans
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
    def rule(self) -> tuple[Pattern, Score]:
        """Return the pattern and the score."""

    @property
    def selects(self) -> bool:
        """Whether no subclass computes masks in its own way."""
        return type(self).compute_mask is Selecting.compute_mask

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
        shard = fitted(pattern, local_shard("0.t", t if t.is_floating_point() else t.double()), "t")
        agreed, _ = agree_on(Alone(), lambda: (_found([shard]), {}, score, None))

        def make_scores() -> list[LocalScores]:
            return [LocalScores(shard, agreed.score, {}, left, counts_gone=True) for shard in agreed.shards()]

        (chosen,) = self.choose(agreed, make_scores, "tensor")()
        if chosen.num_nans:
            raise_nans(Alone(), {"t": chosen.num_nans})
        return (default_mask * chosen.mask.to(default_mask.dtype)).to(dtype)


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
        shard = local_shard("mask", default_mask) if is_held(default_mask) else None
        mask = local_part(self.mask, default_mask, shard, "mask")
        if isinstance(default_mask, DTensor):
            return default_mask * dtensor_like(default_mask, mask)
        return default_mask * mask.to(default_mask.dtype)


def _found(shards: list[LocalShard]) -> Found:
    return Found(shards, [], by_default=False, has_blocks=False)


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
    as in PyTorch. Rounds: one to agree, those of the method, and one at the end, of 16 bytes. Nothing is changed before
    all ranks have decided.
    """

    def look() -> tuple[Found, Facts, Score, tuple[list[Target], list[Hook]]]:
        pairs = make_pairs()
        methods = [make_method() for _ in pairs]
        targets = find_targets(pairs, scores)
        for target, method in zip(targets, methods, strict=True):
            _check_fits(target, method, scope)
        told = facts(targets, plain(methods[0]), scores) if targets and comm.size > 1 else {}
        score = methods[0].rule()[1] if methods and isinstance(methods[0], Selecting) else Magnitude()
        shards = [shard for target in targets if (shard := target.ranked) is not None]
        return _found(shards), told, score, (targets, methods)

    agreed, (targets, methods) = agree_on(comm, look)
    if not targets:
        return []
    kind, held = pruning_type(methods[0]), [target for target in targets if target.shard is not None]
    if isinstance(methods[0], Selecting) and methods[0].selects:

        def make_scores() -> list[LocalScores]:
            shards = zip(held, agreed.shards(), strict=True)
            return [target.scores_of(shard, kind, agreed.score) for target, shard in shards]

        settle = methods[0].choose(agreed, make_scores, scope)

        def decide() -> Decision:
            chosen = {target.label: part for target, part in zip(held, settle(), strict=True)}
            keep = {label: part.mask for label, part in chosen.items()}
            masks = [target.next_mask(keep.get(target.label), kind) for target in targets]
            return _changes(targets, masks, methods, scope), {label: part.num_nans for label, part in chosen.items()}

    else:
        masks = _masks_of_users(agreed, targets, methods, scope)

        def decide() -> Decision:
            return _changes(targets, masks, methods, scope), {}

    return put_in_place(comm, decide)


def _masks_of_users(
    agreed: Agreed, targets: Sequence[Target], methods: Sequence[Hook], scope: Scope
) -> list[torch.Tensor]:
    """Return the masks that users' own methods compute, the same on replicas. Every rank must call it: one round."""
    masks: list[torch.Tensor] = []

    def shards() -> list[LocalShard]:
        masks.extend(masks_by_users(targets, methods, over_all=scope == "global"))
        held = [local_of(mask) for target, mask in zip(targets, masks, strict=True) if target.shard is not None]
        return [
            dataclasses.replace(shard, local=mask.reshape(shard.local.shape))
            for shard, mask in zip(agreed.shards(), held, strict=True)
        ]

    check_parts(agreed.comm, agreed.roster, shards)
    return masks


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


@dataclass(frozen=True)
class Change:
    """A target's next mask, in the layout of its parameter, and the method that made it; ``None``: it was there."""

    target: Target
    mask: torch.Tensor
    method: Hook | None


# A change for every target, and the number of NaNs in this rank's scores, by label.
Decision = tuple[Sequence[Change], Mapping[str, int]]


def _changes(
    targets: Sequence[Target], masks: Sequence[torch.Tensor], methods: Sequence[Hook], scope: Scope
) -> list[Change]:
    made_by = [CustomFromMask(mask) for mask in masks] if scope == "global" else methods
    return [Change(*change) for change in zip(targets, masks, made_by, strict=True)]


def put_in_place(comm: Communicator, decide: Callable[[], Decision]) -> list[Hook]:
    """Put masks and hooks in place once all ranks have decided, and return the hooks. One round of 16 bytes.

    ``decide`` is local; what it raises on one rank is raised on all.
    """
    changes: list[Change] = []
    num_nans: dict[str, int] = {}

    def decided(any_nan: torch.Tensor) -> None:
        found, nans = decide()
        changes.extend(found)
        num_nans.update(nans)
        any_nan[0] = any(nans.values())

    if max_together(comm, (1,), decided)[0]:
        raise_nans(comm, num_nans)
    return [_place(change) for change in changes]  # entries of dicts: from here on no rank can fail


def _place(change: Change) -> Hook:
    """Put a mask in place, and let no method but the latest keep one. Local."""
    target, method, hook = change.target, change.method, next(iter(change.target.old_hooks.values()), None)
    methods: list[Hook] = (
        list(hook) if isinstance(hook, torch_prune.PruningContainer) else [] if hook is None else [hook]
    )
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
    reparametrize(target.module, target.name, change.mask, target.managed)
    target.module.register_forward_pre_hook(hook)
    for part in methods:
        if isinstance(part, CustomFromMask):
            part.mask = change.mask if part is methods[-1] else None
    return hook
