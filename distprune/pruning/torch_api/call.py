"""One call on many parameters: look, agree, decide, commit. It succeeds on all ranks, or changes nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from distprune.collectives import Communicator, max_together
from distprune.masks import Fsdp2Params, Snapshot, reparametrize
from distprune.models import Found
from distprune.pruning.agreement import Agreed, agree_on
from distprune.pruning.torch_api.targets import Hook, Pairs, Scores, Target, facts, find_target
from distprune.scores import Magnitude, Score
from distprune.selection import raise_nans

__all__ = ["Change", "Decision", "Plan", "commit", "prune_targets"]


@dataclass(frozen=True)
class Change:
    """A target's next mask, in the layout of its parameter, and the hook that goes with it.

    ``added``: the method to append to the hook, if that is a container which is there already.
    """

    target: Target
    mask: torch.Tensor
    hook: Hook
    added: Hook | None = None


@dataclass(frozen=True)
class Decision:
    """``changes``: one for every target. ``num_nans``: NaNs in this rank's scores, by label."""

    changes: list[Change]
    num_nans: dict[str, int]


class Plan(ABC):
    """What a call does with its targets."""

    score: Score = Magnitude()

    @abstractmethod
    def look(self, targets: Sequence[Target]) -> object:
        """Check ``targets``, and return what all ranks must agree on. Local; an error is raised on all ranks."""

    @abstractmethod
    def decide(self, agreed: Agreed, targets: Sequence[Target]) -> Callable[[], Decision]:
        """Return a function that returns the decision: local, within the last round. Every rank calls this."""


def prune_targets(
    comm: Communicator, pairs: Pairs, scores: Scores | None, plan: Plan, error: Exception | None = None
) -> list[Hook]:
    """Do what ``plan`` says with all of ``pairs``, and return their hooks. Every rank must call it.

    ``error``: what the caller already found wrong; it is raised on all ranks. Rounds: one to agree, those of the plan,
    and one at the end, of 16 bytes. If something fails there, every rank undoes its changes.
    """
    targets: list[Target] = []
    own_facts: dict[str, object] = {}
    try:
        fsdp2 = Fsdp2Params() if error is None else None
        for index, (module, name) in enumerate(pairs if error is None else []):
            given = (scores or {}).get((module, name))
            targets.append(find_target(cast(Fsdp2Params, fsdp2), module, name, index, given))
        _check_distinct(targets)
        if targets:
            own_facts = facts(comm, targets, plan.look(targets), scores)
    except Exception as caught:
        error = caught
    shards = [shard for target in targets if error is None and (shard := target.ranked) is not None]
    found = Found(shards, [], by_default=False, has_blocks=False)
    agreed = agree_on(comm, found, own_facts, plan.score, error)
    return commit(comm, plan.decide(agreed, targets)) if targets else []


def commit(comm: Communicator, decide: Callable[[], Decision]) -> list[Hook]:
    """Put the masks and hooks in place, and return the hooks; ``decide`` is local. One round of 16 bytes.

    If any of it fails on one rank, every rank puts everything back.
    """
    undo: list[Callable[[], None]] = []
    num_nans: dict[str, int] = {}
    hooks: list[Hook] = []

    def place(any_nan: torch.Tensor) -> None:
        decision = decide()
        num_nans.update(decision.num_nans)
        any_nan[0] = any(num_nans.values())
        for change in decision.changes:
            undo.append(Snapshot(change.target.module, change.target.managed).put_back)
            _place(change, undo)
            hooks.append(change.hook)

    try:
        if max_together(comm, (1,), place)[0]:
            raise_nans(comm, num_nans)
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise
    return hooks


def _place(change: Change, undo: list[Callable[[], None]]) -> None:
    target = change.target
    if change.added is not None:
        container = cast(Any, change.hook)
        before = container.__dict__.copy()
        undo.append(lambda: container.__dict__.update(before))
        container.add_pruning_method(change.added)
    for key in target.old_hooks:
        del target.module._forward_pre_hooks[key]
    reparametrize(target.module, target.name, change.mask, target.managed)
    target.module.register_forward_pre_hook(change.hook)


def _check_distinct(targets: Sequence[Target]) -> None:
    seen: set[tuple[int, str]] = set()
    for target in targets:
        key = id(target.module), target.name
        if key in seen:
            raise ValueError(f"parameter {target.name!r} of {type(target.module).__name__} is in the call twice")
        seen.add(key)
