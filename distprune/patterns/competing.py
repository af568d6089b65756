"""Which competitions a call has, and how many are pruned in each."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from distprune.patterns.base import Ranked, Scope, Shares, own_share
from distprune.selection.host import Keyed, Source
from distprune.selection.order import Order
from distprune.selection.radix import Competition
from distprune.shards.geometry import Geometry


def num_lowest(share: Shares, names: Sequence[str], num: int, num_gone: int, what: str = "", *, of_left: bool) -> int:
    """Return how many of the ``num`` elements of parameters ``names`` are pruned in all.

    The ``num_gone`` that are gone are among them. ``share`` is of all elements, or, with ``of_left``, of those that are
    not gone. ``what`` says in an error what is counted.

    Raises:
        ValueError: the share is more than there is, or none is given for the parameter.
    """
    where = (repr(names[0]) if len(names) == 1 else "all parameters together") + what
    if isinstance(share, Mapping):
        share = own_share(share, names[0])
    before = num_gone if of_left else 0
    wanted = int(share) if isinstance(share, numbers.Integral) else round(float(share) * (num - before))
    if wanted > num - before:
        name, counted = ("amount", "unpruned elements left") if of_left else ("sparsity", "elements")
        raise ValueError(f"{name}={share} is more than the {num - before} {counted} in {where}")
    return before + wanted


@dataclass(frozen=True)
class Competing:
    """The members of a call, in one competition (``scope="global"``) or each in its own (``"tensor"``).

    ``num_of``: by member, what competes of it: elements, or blocks.
    """

    ranked: Ranked
    scope: Scope
    num_of: Sequence[int]

    @cached_property
    def _firsts(self) -> list[int]:
        return list(itertools.accumulate(self.num_of, initial=0))

    @property
    def members(self) -> list[list[int]]:
        """The members in each competition."""
        if self.scope == "global":
            return [list(range(len(self.num_of)))] if self.num_of else []
        return [[i] for i in range(len(self.num_of))]

    def place(self, member: int) -> tuple[int, int]:
        """Return the competition of ``member``, and its first position there."""
        return (0, self._firsts[member]) if self.scope == "global" else (member, 0)

    def source(self, member: int, scores: Keyed, geometry: Geometry, *, owned: bool) -> Source:
        """Return what ``member`` enters into its competition."""
        return Source(self.ranked.roster.members[member].name, scores, geometry, owned, *self.place(member))

    def competitions(
        self, share: Shares, num_gone: Sequence[int], order: Callable[[Sequence[int]], Order], what: str = ""
    ) -> list[Competition]:
        """Return the competitions, of which the ``share`` lowest are to be pruned. Local.

        ``num_gone``: by member. ``order`` returns the order of some members; ``what`` says in an error what is counted.
        """
        names = [member.name for member in self.ranked.roster.members]
        competitions = []
        for members in self.members:
            num, gone = sum(self.num_of[i] for i in members), sum(num_gone[i] for i in members)
            wanted = num_lowest(share, [names[i] for i in members], num, gone, what, of_left=self.ranked.of_left)
            name = repr(names[members[0]]) if self.scope == "tensor" else "all parameters together"
            competitions.append(Competition(name, order(members), num, wanted))
        return competitions

    def by_member(self, thresholds: list[float | int | None]) -> list[float | int | None]:
        """Return the threshold of each member, given those of the competitions."""
        return thresholds * len(self.num_of) if self.scope == "global" else thresholds
