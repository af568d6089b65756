"""What a pattern is: which elements compete with each other, and the choice among them.

Nouns: the *members* of a call are all its parameters, in the order that all ranks agreed on. What was pruned before
is *gone*; it is pruned first. A *share* says how many elements are pruned: a float is a fraction, rounded by
``round()``, an int is a number, a mapping has one of either for each parameter. It is
a share of all elements, or *of what is left*, as in ``torch.nn.utils.prune``.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np
import torch
from typing_extensions import override

from distprune.collectives.base import Communicator
from distprune.collectives.guarded import guarding
from distprune.collectives.roster import Roster
from distprune.kernels.available import has_kernels
from distprune.mistakes import is_ours
from distprune.scores.base import LocalScores, Score
from distprune.selection.order import Order, common_order
from distprune.shards.device import on_host, own_settings
from distprune.shards.local_shard import LocalShard, no_values
from distprune.shards.matrix import Matrix

Scope = Literal["global", "tensor"]
Shares = int | float | Mapping[str, int | float]  # of all, or of each parameter by name


@dataclass(frozen=True)
class Ranked:
    """What a pattern chooses from: the members of a call, and this rank's scores of them.

    ``make_scores`` runs within the first round, so that an error in it is raised on all ranks. ``of_left``: shares are
    of what is left; otherwise they are of everything, and zero weights are gone. ``checks``: the pattern must check
    that the ranks' shards fit together. ``regrows``: of each tensor, group or row, as many are pruned as are gone, but
    what is gone competes with the others; no score is negative.
    """

    comm: Communicator
    roster: Roster
    score: Score
    make_scores: Callable[[], Sequence[LocalScores]]
    of_left: bool = False
    checks: bool = True
    regrows: bool = False

    @cached_property
    def scores(self) -> Sequence[LocalScores]:
        """The scores of this rank's shards."""
        scores = self.make_scores()
        for each in scores:
            if each.shard.local.is_meta:
                raise no_values(each.shard.name)
        return [dataclasses.replace(each, regrows=True) for each in scores] if self.regrows else scores

    def shards(self) -> list[LocalShard]:
        """Return this rank's shards."""
        return [scores.shard for scores in self.scores]

    @property
    def on_gpu(self) -> bool:
        """Whether what each rank holds lies on one GPU that has kernels: all ranks say the same."""
        return self.roster.on_gpu if self.comm.size > 1 else has_kernels(*(scores.device for scores in self.scores))

    @cached_property
    def local(self) -> dict[int, LocalScores]:
        """The scores of this rank's shards, by member, ascending."""
        return dict(sorted((self.index[scores.shard.name], scores) for scores in self.scores))

    @cached_property
    def owned(self) -> dict[int, LocalScores]:
        """The scores that this rank counts, by member, ascending."""
        return {member: scores for member, scores in self.local.items() if scores.shard.owned}

    @cached_property
    def index(self) -> dict[str, int]:
        """The index of every member, by name."""
        return self.roster.index()

    @cached_property
    def numels(self) -> list[int]:
        """The number of elements of every member, over all ranks."""
        return [math.prod(member.global_shape) for member in self.roster.members]

    @own_settings()
    def choose(self, pattern: Pattern) -> Choice:
        """Return what ``pattern`` chooses. Every rank must call it; what raises on one rank is raised on all.

        Rounds are those of :meth:`Pattern.choose`, and, of a pattern that is not this library's, 64 bytes before each
        and after the last. What it and the scores compute stands in ``own_settings``.
        """
        if is_ours(type(pattern)):
            choice = pattern.choose(self)
        else:
            with guarding(self.comm) as comm:
                choice = pattern.choose(dataclasses.replace(self, comm=comm, make_scores=lambda: self.scores))
        return dataclasses.replace(choice, decide=own_settings()(choice.decide))

    def order(self, members: Sequence[int]) -> Order:
        """Return the order in which elements of ``members`` compete.

        Raises:
            TypeError: their scores have no common order.
        """
        kinds = set()
        for name, first in {self.roster.members[i].dtype: i for i in reversed(members)}.items():
            dtype = getattr(torch, name.removeprefix("torch."))
            if self.score.ordered_by == "magnitude" and not (dtype.is_floating_point or dtype.is_complex):
                raise TypeError(
                    f"{self.roster.members[first].name!r} holds {name} values, which have no magnitude to prune by: "
                    "prune a model before it is quantized, or leave it out with exclude"
                )
            kinds.add((self.score.ordered_by, self.score.dtype(dtype)))
        return common_order(kinds, zeros_gone=self.score.zero_where_weights_are and not self.of_left)


class InPlace(Protocol):
    """What writes zeros into the weights themselves."""

    def zero(self) -> bool:
        """Write them, if no score is NaN on any rank; return whether kernels could. Every rank must call it.

        What fails raises on every rank; with several, before anything is changed.
        """

    def counts(self) -> torch.Tensor:
        """Return the counts of each shard, (shards, 3), on the CPU. Local, one wait."""


@dataclass(frozen=True)
class Choice:
    """What a pattern chose.

    ``thresholds``: by member, the highest score that is pruned; ``None`` where nothing new is pruned, or where each
    group or row has its own.

    ``decide(scores, out)`` writes what stays of one of this rank's shards, or of a piece of one on the host that cuts
    no unit (see :meth:`Pattern.unit`), into ``out``: bool, 1-D, contiguous, on the device of the weights. It returns
    how many elements are pruned, how many of these were gone before, and how many scores are NaN: int64, on that
    device. It is local; the caller runs it within its next round and sums the NaNs, which must be 0. ``decide_all``
    does the same for many shards, where that is quicker together. ``in_place`` writes zeros
    into all weights, without a mask.
    """

    thresholds: list[float | int | None]
    decide: Callable[[LocalScores, torch.Tensor], torch.Tensor]
    decide_all: Callable[[Sequence[LocalScores], Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
    in_place: InPlace | None = None

    def write_masks(self, scores: Sequence[LocalScores]) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the mask of each of ``scores``, and the counts that ``decide`` returns. Local, as ``decide``."""
        masks = [empty_mask(each.shard.geometry.local_shape, each.device) for each in scores]
        outs = [mask.view(-1) for mask in masks]
        with own_settings():
            counts = [*map(self.decide, scores, outs)] if self.decide_all is None else self.decide_all(scores, outs)
        return masks, counts


def empty_mask(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return an uninitialised mask. Local."""
    if on_host(device):  # numpy asks for huge pages: the first write to small ones takes as long as the choice
        return torch.from_numpy(np.empty(tuple(shape), dtype=np.bool_))
    return torch.empty(tuple(shape), dtype=torch.bool, device=device)


class Pattern(ABC):
    """Which elements compete with each other. A subclass is a small frozen dataclass; ranks compare its ``repr``.

    >>> layer = torch.nn.Linear(8, 4)
    >>> patterns = [Unstructured(0.25), PerRow(0.25), Block(2, 0.25), Channels(0.25, dim=0), NByM(6, 8)]
    >>> [compute_masks(layer, pattern=pattern).sparsity() for pattern in patterns]
    [0.25, 0.25, 0.25, 0.25, 0.25]
    """

    needs_matrix: ClassVar[bool] = True  # it must know which dims are rows (outputs) and which are inputs
    is_by_row: ClassVar[bool] = False  # each row, or each group within a row, is decided by itself, as keep() does

    @property
    def width(self) -> int:
        """Ranges of columns can be decided one by one if their width is a multiple of this; if 0, they cannot."""
        return 0

    def part(self, start: int, stop: int) -> Pattern:  # noqa: ARG002
        """Return the pattern for columns ``start`` to ``stop``. Ranges decided one by one add up to the whole."""
        return self

    def of(self, name: str) -> Self:
        """Return the pattern for parameter ``name`` alone: with its own sparsity, where each has one.

        Raises:
            ValueError: there is none for it.
        """
        return self.with_shares(lambda shares: own_share(shares, name))

    def with_shares(self, change: Callable[[Mapping[str, int | float]], Shares]) -> Self:
        """Return the pattern with its sparsities changed, where each parameter has one; else as it is."""
        shares: object = vars(self).get("sparsity")
        if not isinstance(shares, Mapping):
            return self
        return dataclasses.replace(self, sparsity=change(shares))  # type: ignore[type-var]

    def by_row(self) -> Pattern:
        """Return the pattern that decides each row by itself, if this one lets weights of many rows compete."""
        return self

    @property
    def has_scope(self) -> bool:
        """Whether more than a group or a row competes, so that a scope says how much more."""
        return any(field.name == "scope" for field in dataclasses.fields(self))  # type: ignore[arg-type]

    @abstractmethod
    @override
    def __str__(self) -> str:
        """Return the text form, without the share that is pruned."""

    def unit(self, matrix: Matrix) -> tuple[int, int]:
        """Return how many rows and inputs of ``matrix`` are decided together, at multiples of these.

        Raises:
            NotImplementedError: the pattern decides whole parameters alone, not pieces of them.
        """
        raise NotImplementedError(f"{self!r} is not decided piece by piece; load the model to prune by it")

    def check_fits(self, name: str, matrix: Matrix) -> None:  # noqa: B027
        """Check that the pattern divides ``matrix``, the weights of parameter ``name``. Local.

        Raises:
            ValueError: it does not; the message names the parameter.
        """

    def check_shape(self, shape: Sequence[int]) -> None:  # noqa: B027
        """Check that the pattern goes with parameters of the global ``shape``. Local.

        Raises:
            ValueError, IndexError: it does not.
        """

    def within(self, scope: Scope) -> Pattern:
        """Return the pattern with ``scope``: ``"tensor"``, each parameter by itself, or ``"global"``, all together.

        Raises:
            ValueError: an unknown scope, or a pattern that decides groups or rows one by one.
        """
        if scope not in ("global", "tensor"):
            raise ValueError(f"scope={scope!r} is not known; use 'global' or 'tensor'")
        if not self.has_scope:
            raise ValueError(f"{scope=} does not go with {self!r}: groups and rows are decided one by one")
        return dataclasses.replace(self, scope=scope)  # type: ignore[type-var]

    def regrowth(self, share: float) -> tuple[Pattern, Pattern]:
        """Return what drops ``share`` of what is kept, and then what chooses what is kept from now on.

        The second is given what ``regrows``, of which what was not dropped has the highest scores. A pattern with a
        ``sparsity`` drops within each tensor, or each row, and keeps as many there.

        Raises:
            NotImplementedError: the pattern does not say how weights move within it.
        """
        if "sparsity" not in vars(self):
            raise NotImplementedError(f"{self!r} does not say how weights move within it: give it a method regrowth()")
        within: Any = self.within("tensor") if self.has_scope else self
        return dataclasses.replace(within, sparsity=share), dataclasses.replace(within, sparsity=0.0)

    @abstractmethod
    def choose(self, ranked: Ranked) -> Choice:
        """Return what is pruned. Every rank must call it. Each pattern says which rounds it takes.

        Raises:
            ValueError: on every rank: scores are NaN; replicas differ; an element is owned by no rank or by several;
                the share is more than there is.
            TypeError: on every rank: the scores' dtypes have no common order.
            Exception: on every rank: what was raised on one.
        """

    def keep(self, scores: torch.Tensor) -> torch.Tensor:
        """Return what stays, bool, of ``scores`` (rows, inputs), each row decided by itself. Local.

        Raises:
            NotImplementedError: weights of several rows compete.
        """
        raise NotImplementedError(f"{self!r} is not decided row by row")


def shares_of(share: Shares) -> list[int | float]:
    """Return all shares, whether there is one or one for each parameter. Local."""
    return list(share.values()) if isinstance(share, Mapping) else [share]


def check_share(share: object, name: str = "sparsity", scope: Scope | None = None) -> None:
    """Check that ``share`` is an int >= 0 or a float in [0, 1], or a mapping from names to some. Local.

    Raises:
        TypeError: it is not a number, or it is a bool.
        ValueError: it is out of range, or parameters with shares of their own compete with each other in ``scope``.
    """
    if isinstance(share, Mapping):
        for key, value in share.items():
            check_share(value, f"{name}[{key!r}]")
        if scope == "global":
            raise ValueError("a sparsity for each parameter goes with scope='tensor', not with scope='global'")
        return
    if isinstance(share, bool) or not isinstance(share, numbers.Real):
        raise TypeError(f"{name} must be a float (which fraction) or an int (how many), not {share!r}")
    if isinstance(share, numbers.Integral):
        if int(share) < 0:
            raise ValueError(f"{name}={share} is negative; an int says how many elements to prune")
    elif not (math.isfinite(share) and 0.0 <= float(share) <= 1.0):
        raise ValueError(f"{name}={share} is outside [0.0, 1.0]; a float says which fraction to prune")


def own_share(shares: Mapping[str, int | float], name: str) -> int | float:
    """Return the share of parameter ``name``. Local.

    Raises:
        ValueError: there is none.
    """
    if name not in shares:
        raise ValueError(f"there is no sparsity for {name!r}; give one for each parameter: 0 leaves it dense")
    return shares[name]
