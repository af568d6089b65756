"""What a pattern is: who competes with whom, and the choice among them.

Nouns: a call's *members* are all its parameters, in the order that all ranks agreed on. *Gone* is what was pruned
before; it goes first. A *share* says how many go: a float is a fraction, rounded by ``round()``, an int that
many; of all elements with those that are gone, or *of what is left*, as ``torch.nn.utils.prune`` counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from typing_extensions import override

from distprune.collectives import Communicator, Roster
from distprune.scores import LocalScores, Score
from distprune.selection import Chosen, Competition, Entry, Order, common_order, select_lowest
from distprune.shards import Matrix

__all__ = ["Choice", "Pattern", "Ranked", "Scope", "check_share", "compete", "num_lowest"]

Scope = Literal["global", "tensor"]


@dataclass(frozen=True)
class Ranked:
    """What is chosen from: the members of a call, and this rank's scores of them.

    ``make_scores`` runs within the first round, so that what it raises is raised on all ranks. ``of_left``: shares are
    of what is left; otherwise of everything, and weights that are zero are gone. ``checks``: that the ranks' parts
    fit together is not known yet.
    """

    comm: Communicator
    roster: Roster
    score: Score
    make_scores: Callable[[], Sequence[LocalScores]]
    of_left: bool = False
    checks: bool = True

    @cached_property
    def scores(self) -> Sequence[LocalScores]:
        return self.make_scores()

    @cached_property
    def place(self) -> dict[str, int]:
        """The place of every member."""
        return self.roster.index()

    @cached_property
    def numels(self) -> list[int]:
        return [math.prod(member.global_shape) for member in self.roster.members]

    def order(self, members: Sequence[int]) -> Order:
        """Return the order in which elements of ``members`` compete.

        Raises:
            TypeError: there is none.
        """
        dtypes = [getattr(torch, self.roster.members[i].dtype.removeprefix("torch.")) for i in members]
        kinds = [(self.score.ordered_by, self.score.dtype(dtype)) for dtype in dtypes]
        return common_order(kinds, zeros_gone=self.score.zero_where_weights_are and not self.of_left)


@dataclass(frozen=True)
class Choice:
    """``thresholds``: by member, the score of the last that goes, ``None`` where nothing new does, or there are many.

    ``settle`` returns what was chosen of each of this rank's scores; local, to be run within the caller's next
    round, with the sums of ``num_nans``, which must be 0.
    """

    thresholds: list[float | int | None]
    settle: Callable[[], list[Chosen]]


class Pattern(ABC):
    """Who competes with whom. A subclass is a small frozen dataclass; what it needs of matrices it checks itself."""

    @property
    def needs_matrix(self) -> bool:
        """Whether it must be known which dims are rows and which are inputs."""
        return True

    @property
    def is_by_row(self) -> bool:
        """Whether each row, or group of one, is decided for itself, as :meth:`keep` does."""
        return False

    @property
    def width(self) -> int:
        """Of what number of columns stretches must be multiples to be decided one by one; 0: they cannot be."""
        return 0

    def part(self, start: int, stop: int) -> Pattern:  # noqa: ARG002
        """Return the pattern of columns ``start`` to ``stop``, so that stretches decided one by one add up to all."""
        return self

    def by_row(self) -> Pattern:
        """Return the pattern with each row decided for itself, where more than a row competes weight by weight."""
        return self

    @property
    def has_scope(self) -> bool:
        """Whether it has competitors beyond a group or a row."""
        return any(field.name == "scope" for field in dataclasses.fields(self))  # type: ignore[arg-type]

    @abstractmethod
    @override
    def __str__(self) -> str:
        """Return the text form, without how much is pruned."""

    def check_fits(self, name: str, matrix: Matrix) -> None:  # noqa: B027
        """Raise a ``ValueError`` that names ``name`` if its weights, ``matrix``, cannot be grouped. Local."""

    def check_shape(self, shape: Sequence[int]) -> None:  # noqa: B027
        """Raise if parameters of the global ``shape`` cannot be grouped. Local."""

    def within(self, scope: Scope) -> Pattern:
        """Return the pattern whose competitors are those of a tensor, or of all.

        Raises:
            ValueError: nothing competes beyond a group or a row.
        """
        if scope not in ("global", "tensor"):
            raise ValueError(f"scope={scope!r} is none of ('global', 'tensor')")
        if not self.has_scope:
            raise ValueError(f"{scope=} does not go with {self!r}: groups and rows are decided one by one")
        return dataclasses.replace(self, scope=scope)  # type: ignore[type-var]

    @abstractmethod
    def choose(self, ranked: Ranked) -> Choice:
        """Return what goes. Every rank must call it; rounds are the pattern's.

        Raises:
            ValueError: on every rank: scores are NaN, replicas differ, elements that no rank or several own, or a
                share larger than what there is.
            TypeError: on every rank: scores of dtypes that have no common order.
            Exception: on every rank, what raised on one.
        """

    def keep(self, scores: torch.Tensor) -> torch.Tensor:
        """Return what stays, bool, of whole rows ``scores`` (rows, in) decided for themselves. Local.

        Raises:
            NotImplementedError: more than a row competes.
        """
        raise NotImplementedError(f"{self!r} is not decided row by row")


def check_share(share: object, name: str = "sparsity") -> None:
    """Raise unless ``share`` is an int >= 0 or a float in [0, 1].

    Raises:
        TypeError: it is no real number, or a bool.
        ValueError: it is out of range.
    """
    if isinstance(share, bool) or not isinstance(share, numbers.Real):
        raise TypeError(f"{name} must be a float (which fraction) or an int (how many), not {share!r}")
    if isinstance(share, numbers.Integral):
        if int(share) < 0:
            raise ValueError(f"{name}={share} is negative; an int says how many elements to prune")
    elif not (math.isfinite(share) and 0.0 <= float(share) <= 1.0):
        raise ValueError(f"{name}={share} is outside [0.0, 1.0]; a float says which fraction to prune")


def num_lowest(share: int | float, num: int, num_gone: int, where: str, *, of_left: bool) -> int:
    """Return how many of ``num`` go, with the ``num_gone`` that are gone, if ``share`` of all, or of the others, do.

    Raises:
        ValueError: more than there are; ``where`` names them.
    """
    before = num_gone if of_left else 0
    wanted = int(share) if isinstance(share, numbers.Integral) else round(float(share) * (num - before))
    if wanted > num - before:
        name, what = ("amount", "unpruned elements left") if of_left else ("sparsity", "elements")
        raise ValueError(f"{name}={share} is more than the {num - before} {what} in {where}")
    return before + wanted


def compete(
    ranked: Ranked,
    share: int | float,
    scope: Scope,
    numels: Sequence[int],
    num_gone: Sequence[int],
    order: Callable[[Sequence[int]], Order],
    make_entries: Callable[[Callable[[int], tuple[int, int]]], list[Entry]],
) -> Choice:
    """Choose the ``share`` lowest of each member, or of all together; :func:`select_lowest`'s rounds.

    ``numels`` and ``num_gone`` count what competes by member: elements, or blocks; ``order`` is that of some members.
    ``make_entries`` is given what returns the competition of a member and its first position there.
    """
    names = [member.name for member in ranked.roster.members]
    competitors = [list(range(len(names)))] if scope == "global" else [[i] for i in range(len(names))]
    competitions = []
    for members in competitors if names else []:
        name = repr(names[members[0]]) if scope == "tensor" else "all parameters together"
        num, gone = sum(numels[i] for i in members), sum(num_gone[i] for i in members)
        wanted = num_lowest(share, num, gone, name, of_left=ranked.of_left)
        competitions.append(Competition(name, order(members), num, wanted))
    firsts = list(itertools.accumulate(numels, initial=0)) if scope == "global" else [0] * len(names)

    def place(member: int) -> tuple[int, int]:
        return (0, firsts[member]) if scope == "global" else (member, 0)

    selection = select_lowest(ranked.comm, competitions, lambda: make_entries(place))
    return Choice([selection.thresholds[place(i)[0]] for i in range(len(names))], selection.settle)
