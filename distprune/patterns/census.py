"""Whether the ranks' shards fit together, and how much was pruned before: the first round of a choice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import torch

from distprune.kernels.held import count_zeros
from distprune.patterns.base import Ranked, Scope, Shares, own_share
from distprune.scores.base import LocalScores
from distprune.selection.order import Order
from distprune.selection.radix import Competition
from distprune.shards.parts import check_parts


def take_census(
    ranked: Ranked, *, counts_gone: bool = False, num_cut: Callable[[LocalScores], int] | None = None
) -> tuple[list[int], list[int]]:
    """Return by member, over all ranks, how many elements were pruned before, and how many shard edges cut.

    Elements, or blocks, are cut off from the others of their group, row or block; ``num_cut`` counts them. Every rank
    must call it. One round of 8 bytes a parameter for each of the two counts, and for what has to be checked (see
    :func:`check_parts`); none if there is nothing to do. What is not counted is 0.

    Raises:
        ValueError: on every rank: replicas differ, or an element is owned by no rank or by several.
    """

    def count(words: torch.Tensor) -> None:
        if counts_gone:
            gone = {member: scores.gone for member, scores in ranked.owned.items() if scores.gone is not None}
            words.numpy()[[*gone], 0] = count_zeros([*gone.values()])
        if num_cut is not None:
            words.numpy()[[*ranked.local], -1] = [*map(num_cut, ranked.local.values())]

    none, num_counts = [0] * len(ranked.numels), counts_gone + (num_cut is not None)
    if not num_counts and {1}.issuperset(ranked.roster.num_copies):
        return none, none
    counts = check_parts(
        ranked.comm, ranked.roster, ranked.shards, lambda: [each.reads for each in ranked.scores], num_counts, count
    ).T.tolist()
    return counts[0] if counts_gone else none, none if num_cut is None else counts[-1]


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
    wanted = int(share) if isinstance(share, Integral) else round(float(share) * (num - before))
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
    def firsts(self) -> list[int]:
        """How much competes of all members before each one, and in all."""
        return list(itertools.accumulate(self.num_of, initial=0))

    def place(self, scores: LocalScores) -> tuple[int, int]:
        """Return the competition of the elements of a shard, and the first position of its parameter there."""
        member = self.ranked.index[scores.shard.name]
        return (0, self.firsts[member]) if self.scope == "global" else (member, 0)

    def competitions(
        self, share: Shares, num_gone: Sequence[int], order: Callable[[Sequence[int]], Order], what: str = ""
    ) -> list[Competition]:
        """Return the competitions, of which the ``share`` lowest are to be pruned. Local.

        ``num_gone``: by member. ``order`` returns the order of some members; ``what`` says in an error what is counted.
        """
        members, all_of_them = self.ranked.roster.members, range(len(self.num_of))
        groups = [[i] for i in all_of_them] if self.scope == "tensor" else [all_of_them] if members else []
        competitions = []
        for group in groups:
            num, gone = sum(self.num_of[i] for i in group), sum(num_gone[i] for i in group)
            names = [members[i].name for i in group]
            wanted = num_lowest(share, names, num, gone, what, of_left=self.ranked.of_left)
            name = repr(names[0]) if self.scope == "tensor" else "all parameters together"
            competitions.append(Competition(name, order(group), num, wanted))
        return competitions

    def by_member(self, thresholds: list[float | int | None]) -> list[float | int | None]:
        """Return the threshold of each member, given those of the competitions."""
        return thresholds * len(self.num_of) if self.scope == "global" else thresholds
