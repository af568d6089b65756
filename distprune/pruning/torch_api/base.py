"""``BasePruningMethod`` and ``PruningContainer``: the contract of ``torch.nn.utils.prune``, in any layout."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from distprune.collectives import Alone, Communicator, Group, communicator, sum_together, together
from distprune.masks import product, undo_reparametrization
from distprune.models import Found
from distprune.patterns import Pattern, Ranked, Scope, check_parts
from distprune.pruning.agreement import Agreed, agree_on
from distprune.pruning.fitting import fitted
from distprune.pruning.torch_api.call import Change, Decision, Plan, prune_targets
from distprune.pruning.torch_api.targets import Hook, Pairs, Scores, Target, described, next_mask, scores_of
from distprune.pruning.torch_api.users_mask import check_type, mask_by_user, masks_by_users, pruning_type
from distprune.scores import LocalScores, Score
from distprune.selection import Chosen, raise_nans
from distprune.shards import LocalShard, dtensor_like, is_held, local_of, local_shard

__all__ = ["BasePruningMethod", "PruningContainer", "Selecting", "changed", "prune_pairs"]


class BasePruningMethod(torch_prune.BasePruningMethod):
    """Base of all pruning methods; see ``torch.nn.utils.prune.BasePruningMethod``.

    A subclass sets ``PRUNING_TYPE`` (``"unstructured"``, ``"structured"`` or ``"global"``) and writes
    :meth:`compute_mask`. On plain modules that is called as PyTorch calls it. On sharded ones ``t`` and
    ``default_mask`` are DTensors in the parameter's layout, and what is returned must be one too: work
    elementwise (``default_mask * (t.abs() >= 0.1)``). What ranks elements against each other belongs in
    the importance scores of :class:`distprune.L1Unstructured`.
    """

    PRUNING_TYPE: ClassVar[str]
    _tensor_name: str

    @override
    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Put the product into ``module`` under the parameter's name: a forward pre-hook. No communication."""
        setattr(module, self._tensor_name, self.apply_mask(module))

    @abstractmethod
    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask for ``t``, of the same shape, on top of ``default_mask``."""

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
        return prune_pairs(communicator(group), [(module, name)], lambda: cls(*args, **kwargs), scores)[0]

    @override
    def prune(
        self,
        t: torch.Tensor,
        default_mask: torch.Tensor | None = None,
        importance_scores: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``t`` times the mask that :meth:`compute_mask` gives for it, in the layout of ``t``.

        Where ``t`` is a DTensor, every rank of the default group must call it.

        Raises:
            AssertionError: ``importance_scores`` of another shape.
        """
        if importance_scores is None:
            importance_scores = t
        elif importance_scores.shape != t.shape:
            raise AssertionError(
                f"importance_scores should have the same shape as tensor t, got {importance_scores.shape} vs {t.shape}"
            )
        default_mask = default_mask if default_mask is not None else torch.ones_like(t)
        return t * self.compute_mask(importance_scores, default_mask=default_mask)

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

    def settled(self, mask: torch.Tensor) -> None:
        """Note that ``mask``, in the parameter's layout, is in place now."""

    def superseded(self) -> None:
        """Note that another method's mask is in place now."""


class Selecting(BasePruningMethod):
    """A method of this library: a pattern and a score, which decide on the shards of many parameters at once."""

    @abstractmethod
    def rule(self) -> tuple[Pattern, Score] | None:
        """Return the pattern and the score, or ``None`` to prune nothing."""

    @property
    def is_overridden(self) -> bool:
        """Whether a subclass computes masks in its own way."""
        return type(self).compute_mask is not Selecting.compute_mask

    def fitted(self, shard: LocalShard) -> LocalShard:
        """Return the shard with its matrix, if the pattern needs it; raise if the pattern does not fit."""
        rule = self.rule()
        return shard if rule is None else fitted(rule[0], shard, shard.attribute)

    def choose(
        self, agreed: Agreed, make_scores: Callable[[], list[LocalScores]], scope: Scope
    ) -> Callable[[], list[Chosen]]:
        """Return a function that returns what was chosen from each of the scores. Every rank must call it."""
        rule = self.rule()
        if rule is None:
            return lambda: [Chosen(torch.ones_like(s.shard.local, dtype=torch.bool), 0, 0) for s in make_scores()]
        pattern = rule[0].within(scope) if rule[0].has_scope or scope == "global" else rule[0]
        return pattern.choose(Ranked(agreed.comm, agreed.roster, agreed.score, make_scores, of_left=True)).settle

    @override
    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        """Return ``default_mask`` with what the method prunes of ``t`` set to zero, all of ``t`` competing.

        Where ``t`` is a DTensor, every rank of the default group must call it; the mask is a DTensor then.
        """
        return self.mask_among(t, default_mask, None)

    def mask_among(self, t: torch.Tensor, default_mask: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
        """Return ``default_mask`` times what is kept among the elements at which ``earlier`` is not zero."""
        comm, chosen = communicator() if isinstance(t, DTensor) else Alone(), list[Chosen]()
        dtype = t.dtype if pruning_type(self) == "structured" else default_mask.dtype
        t = t if t.is_floating_point() else t.double()
        mask = None if earlier is None else local_of(earlier).bool()
        rule, shards = self.rule(), []
        if is_held(t):
            shards = [self.fitted(dataclasses.replace(local_shard("0.t", t), attribute="t"))]
        score = rule[1] if rule else Plan.score
        found = Found(shards, [], by_default=False, has_blocks=False)
        agreed = agree_on(comm, found, {"method": described(self)}, score)
        settle = self.choose(
            agreed,
            lambda: [LocalScores(s, agreed.score, {}, mask, counts_gone=True) for s in agreed.shards()],
            "tensor",
        )
        num_nans: dict[str, int] = {}

        def count(nans: torch.Tensor) -> None:
            chosen[:] = settle()
            num_nans.update({"t": sum(each.num_nans for each in chosen)})
            nans[0] = num_nans["t"]

        if sum_together(comm, (1,), count)[0]:
            raise_nans(comm, num_nans)
        if not isinstance(t, DTensor):
            return (default_mask * chosen[0].mask.to(default_mask.dtype)).to(dtype)
        local = (chosen[0].mask if chosen else t.to_local().bool()).reshape(t.to_local().shape)
        return default_mask * dtensor_like(t, local)


class PruningContainer(BasePruningMethod, torch_prune.PruningContainer):
    """The methods applied to one parameter, in order; see ``torch.nn.utils.prune.PruningContainer``."""

    def __init__(self, *args: Any) -> None:
        self._pruning_methods: tuple[torch_prune.BasePruningMethod, ...] = ()
        if len(args) == 1:
            self._tensor_name = args[0]._tensor_name
        for method in args:
            self.add_pruning_method(method)

    @override
    def add_pruning_method(self, method: Any) -> None:
        """Append ``method``: a ``TypeError`` if it is none, a ``ValueError`` if it acts on another name."""
        if method is not None and not isinstance(method, torch_prune.BasePruningMethod):
            raise TypeError(f"{type(method)} is not a BasePruningMethod subclass")
        if method is not None and self._tensor_name != method._tensor_name:
            raise ValueError(
                f"Can only add pruning methods acting on the parameter named '{self._tensor_name}' to "
                f"PruningContainer {self}. Found '{method._tensor_name}'"
            )
        for earlier in self._pruning_methods:
            if isinstance(earlier, BasePruningMethod):
                earlier.superseded()
        self._pruning_methods += (method,)  # type: ignore[operator]

    @override
    def __len__(self) -> int:
        return len(self._pruning_methods)

    @override
    def __iter__(self) -> Iterator[torch_prune.BasePruningMethod]:
        return iter(self._pruning_methods)

    @override
    def __getitem__(self, idx: Any) -> Any:
        return self._pruning_methods[idx]

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


def prune_pairs(
    comm: Communicator,
    pairs: Pairs,
    make_method: Callable[[], Hook],
    scores: Scores | None,
    *,
    scope: Scope = "tensor",
    hook_of_mask: Callable[[torch.Tensor], Hook] | None = None,
    error: Exception | None = None,
) -> list[Hook]:
    """Prune all of ``pairs``, each by a new method, and return their hooks. Every rank must call it.

    ``scope``: whether each competes by itself, or all together. ``hook_of_mask`` makes the hook from the mask that was
    decided; without it the method is the hook. ``error``: what the caller already found wrong, raised on all ranks.
    """
    methods: list[Hook] = []
    try:
        methods = [make_method() for _ in pairs] if error is None else []
    except Exception as caught:
        error = caught
    return prune_targets(comm, pairs, scores, _ByMethods(methods, scope, hook_of_mask), error)


class _ByMethods(Plan):
    """Prune every target by a method of its own."""

    def __init__(self, methods: list[Hook], scope: Scope, hook_of_mask: Callable[[torch.Tensor], Hook] | None) -> None:
        self._methods = methods
        self._scope = scope
        self._hook_of_mask = hook_of_mask
        rule = methods[0].rule() if methods and isinstance(methods[0], Selecting) else None
        if rule is not None:
            self.score = rule[1]

    @override
    def look(self, targets: Sequence[Target]) -> object:
        for target, method in zip(targets, self._methods, strict=True):
            method._tensor_name = target.name
            if self._scope == "global" and pruning_type(method) != "unstructured":
                raise TypeError(
                    'Only "unstructured" PRUNING_TYPE supported for the `pruning_method`. Found method '
                    f"{type(method).__name__} of type {pruning_type(method)}"
                )
            if target.old_hooks:
                check_type(method)
            if isinstance(method, Selecting) and target.shard is not None:
                target.shard = method.fitted(target.shard)
            standard = (BasePruningMethod.apply_mask, torch_prune.BasePruningMethod.apply_mask)
            if type(method).apply_mask not in standard and target.managed is not None:
                raise NotImplementedError(
                    f"{type(method).__name__}.apply_mask is its own; under FSDP2 the mask is multiplied into the shard "
                    "before it is gathered, so only the standard product works there"
                )
        return described(self._methods[0])

    @override
    def decide(self, agreed: Agreed, targets: Sequence[Target]) -> Callable[[], Decision]:
        method = self._methods[0]
        if not isinstance(method, Selecting) or method.is_overridden:
            masks = self._computed(agreed, targets)
            return lambda: Decision(self._changes(targets, masks), {})
        kind = pruning_type(method)

        def make_scores() -> list[LocalScores]:
            settled = {shard.name: shard for shard in agreed.shards()}
            return [scores_of(t, settled[t.label], kind, agreed.score) for t in targets if t.label in settled]

        settle = method.choose(agreed, make_scores, self._scope)

        def decided() -> Decision:
            held = [target.label for target in targets if target.ranked is not None]
            chosen = dict(zip(held, settle(), strict=True))
            masks = [next_mask(target, chosen.get(target.label), kind) for target in targets]
            nans = {label: each.num_nans for label, each in chosen.items()}
            return Decision(self._changes(targets, masks), nans)

        return decided

    def _changes(self, targets: Sequence[Target], masks: Sequence[torch.Tensor]) -> list[Change]:
        hooks = self._methods if self._hook_of_mask is None else [self._hook_of_mask(mask) for mask in masks]
        return [changed(target, mask, hook) for target, mask, hook in zip(targets, masks, hooks, strict=True)]

    def _computed(self, agreed: Agreed, targets: Sequence[Target]) -> list[torch.Tensor]:
        """Let the user's own method compute the masks, and check that replicas get equal ones."""
        masks: list[torch.Tensor] = []
        with together(agreed.comm):
            masks = masks_by_users(targets, self._methods, over_all=self._scope == "global")

        def shards() -> list[LocalShard]:
            settled = {shard.name: shard for shard in agreed.shards()}
            return [
                dataclasses.replace(settled[t.label], local=local_of(mask).reshape(settled[t.label].local.shape))
                for t, mask in zip(targets, masks, strict=True)
                if t.label in settled
            ]

        if agreed.comm.size > 1:
            check_parts(agreed.comm, agreed.roster, shards)
        return masks


def changed(target: Target, mask: torch.Tensor, method: Hook) -> Change:
    """Return the change to ``mask``, with the method as hook, or a container of it and of the methods before it."""
    method._tensor_name = target.name
    old = next(iter(target.old_hooks.values()), None)
    if isinstance(method, BasePruningMethod):
        method.settled(mask)
    if old is None and isinstance(method, BasePruningMethod):
        return Change(target, mask, method)
    if isinstance(old, PruningContainer):
        return Change(target, mask, old, added=method)
    # A method of PyTorch's own goes into a container of ours, which knows the layouts.
    return Change(target, mask, contained(target.name, [*flattened(old), method]))


def flattened(hook: Hook | None) -> list[Hook]:
    """Return the methods of a container, or the one method."""
    if hook is None:
        return []
    return list(hook) if isinstance(hook, torch_prune.PruningContainer) else [hook]


def contained(name: str, methods: Sequence[Hook]) -> PruningContainer:
    """Return a container of ``methods``, which act on ``name``."""
    container = PruningContainer()
    container._tensor_name = name
    for method in methods:
        container.add_pruning_method(method)
    return container
