"""Which elements of many parameters are pruned: census, competitions, selection. Changes nothing.

Nouns: a *candidate* is one parameter's part on this rank with what was pruned of it before; a *rule*
says what is to be decided about all of them at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from distprune.collectives import Communicator, Member, Roster
from distprune.methods.amount import num_to_prune
from distprune.scores import Magnitude, Random
from distprune.selection import Competition, Entry, NonZero, Order, Scores, common_order, select_lowest
from distprune.shards import LocalShard, take_census

__all__ = [
    "Candidate",
    "Census",
    "Decision",
    "Method",
    "Rule",
    "Scope",
    "check_replicas",
    "decide",
    "score_of",
    "score_order",
    "total_census",
]

Method = Literal["magnitude", "random"]
Scope = Literal["global", "tensor"]

_NUM_CENSUS_WORDS = 4  # NaNs, zeros, owned elements, how far replicas differ


@dataclass(frozen=True)
class Candidate:
    """The values that are ranked, and ``zeros_of`` (local shape), whose zeros were pruned before."""

    shard: LocalShard
    zeros_of: torch.Tensor | None = None


@dataclass(frozen=True)
class Rule:
    """``zeros``: whether what was pruned before is out, or goes first and counts toward the amount.

    ``reads``: which values the census reads, for NaNs and to compare replicas. The selection finds NaNs
    by itself where it ranks values; a random one may leave them alone.
    """

    method: Method
    amount: int | float
    scope: Scope
    seed: int | None = None
    zeros: Literal["out", "first"] = "out"
    reads: Literal["all", "replicas", "nothing"] = "all"


@dataclass(frozen=True)
class Decision:
    """Masks (bool, local shape, True = keep) by candidate; the rest by member of the roster."""

    masks: list[torch.Tensor]
    num_zeros: list[int]  # before
    thresholds: list[float | int | None]
    seed: int | None


@dataclass(frozen=True)
class Census:
    """By member of the roster; ``num_cut``: elements handed in as such, over all ranks and replicas."""

    num_zeros: list[int]
    num_cut: list[int]
    seed: int | None


def decide(comm: Communicator, roster: Roster, candidates: Sequence[Candidate], rule: Rule) -> Decision:
    """Return what ``rule`` prunes. Every rank of ``comm`` must call it with its own candidates, owners settled.

    One round for the census (32 bytes a parameter) and those of ``select_lowest``.

    Raises:
        ValueError: on every rank: values are NaN, replicas differ, elements without an owner, or an
            amount larger than what is left.
        TypeError: on every rank: values of dtypes that have no common order.
    """
    place = roster.index()
    census = total_census(comm, roster, candidates, rule)
    competitions, competition_of, first_position = _competitions(roster, census, rule)
    entries = [
        Entry(
            candidate.shard.name,
            score_of(candidate.shard, rule, census.seed),
            candidate.shard.geometry,
            bool(candidate.shard.owned),
            competition_of[i],
            first_position[i],
            NonZero(candidate.zeros_of)
            if candidate.zeros_of is not None and rule.zeros == "out" and census.num_zeros[i]
            else None,
        )
        for candidate, i in ((candidate, place[candidate.shard.name]) for candidate in candidates)
    ]
    selection = select_lowest(comm, competitions, entries)
    thresholds = [selection.thresholds[competition] for competition in competition_of]
    return Decision(selection.masks, census.num_zeros, thresholds, census.seed)


def check_replicas(
    comm: Communicator, roster: Roster, shards: Sequence[LocalShard], *, finds_nans: bool = False
) -> None:
    """Raise, on every rank alike, if ranks that hold the same elements hold different values (one round).

    With ``finds_nans`` all values are read, and none may be NaN.
    """
    rule = Rule("magnitude", 0, "tensor", reads="all" if finds_nans else "replicas")
    total_census(comm, roster, [Candidate(shard) for shard in shards], rule)


def total_census(
    comm: Communicator,
    roster: Roster,
    candidates: Sequence[Candidate],
    rule: Rule,
    num_cut: Sequence[int] | None = None,
) -> Census:
    """Count NaNs and zeros over all ranks (one round), and see that ranks' parts fit together.

    ``num_cut``: by candidate, to be summed in the same round (8 bytes a parameter more).

    Raises:
        ValueError: on every rank: values are NaN, replicas differ, or elements without an owner.
    """
    num_words = _NUM_CENSUS_WORDS + (num_cut is not None)
    words = torch.zeros((len(roster.members) + 1, num_words), dtype=torch.int64)
    place = roster.index()
    for i, candidate in enumerate(candidates):
        shard = candidate.shard
        reads_values = rule.reads == "all" or (rule.reads == "replicas" and shard.num_replicas != 1)
        census = take_census(shard, zeros_of=candidate.zeros_of, reads_values=reads_values)
        row = words[place[shard.name]]
        if shard.owned:
            row[:3] = torch.tensor([census.num_nans, census.num_zeros, shard.geometry.local_numel])
        # The owner's checksum, once for every copy, less the copies': zero if all are equal.
        weight = (shard.num_replicas or 1) - 1 if shard.owned else -1
        row[3] = _wrapped(weight * census.checksum)
        if num_cut is not None:
            row[4] = num_cut[i]
    seed = rule.seed
    draws = rule.method == "random" and seed is None
    if draws and comm.rank == 0:
        words[-1, 0] = torch.randint(1 << 62, ())
    words = comm.sum(words)
    if draws:
        seed = int(words[-1, 0])
    nans = [(m.name, int(row[0])) for m, row in zip(roster.members, words, strict=False) if row[0]]
    if nans:
        shown = ", ".join(f"{name!r} ({num_nans})" for name, num_nans in nans)
        raise ValueError(f"values are NaN in {shown}; NaN has no place in the order, mend them first")
    for member, row in zip(roster.members, words, strict=False):
        numel = math.prod(member.global_shape)
        if int(row[2]) != numel:
            raise ValueError(
                f"of the {numel} elements of {member.name!r} the ranks own {int(row[2])}: the group must span "
                "every rank that holds a part of it, and copies of it must be laid out alike"
            )
        if int(row[3]):
            raise ValueError(
                f"ranks that should hold the same values of {member.name!r} hold different ones; bring the replicas "
                "in step, or, for pipeline stages, give parameters different names or pass the stage's own group"
            )
    return Census(words[:-1, 1].tolist(), words[:-1, 4:].sum(1).tolist(), seed)


def _wrapped(number: int) -> int:
    """Return ``number`` modulo 2**64 as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _competitions(roster: Roster, census: Census, rule: Rule) -> tuple[list[Competition], list[int], list[int]]:
    """Return the competitions, and for every member which one it is in and its first position there."""
    numels = [math.prod(member.global_shape) for member in roster.members]
    out = rule.zeros == "out"
    unpruned = [numel - zeros * out for numel, zeros in zip(numels, census.num_zeros, strict=True)]
    if rule.scope == "tensor":
        competitions = [
            Competition(
                member.name,
                score_order([member], rule.method),
                numel,
                left,
                num_to_prune(rule.amount, left, repr(member.name)),
            )
            for member, numel, left in zip(roster.members, numels, unpruned, strict=True)
        ]
        return competitions, list(range(len(numels))), [0] * len(numels)
    left = sum(unpruned)
    num_lowest = num_to_prune(rule.amount, left, "all parameters together")
    order = score_order(roster.members, rule.method)
    whole = Competition("all parameters together", order, sum(numels), left, num_lowest)
    return [whole], [0] * len(numels), list(itertools.accumulate(numels, initial=0))[:-1]


def score_order(members: Sequence[Member], method: Method) -> Order:
    """Return the order in which the scores of ``members`` compete. Local."""
    if method == "random":
        return common_order([("value", torch.int32)])
    return common_order(("magnitude", getattr(torch, member.dtype.removeprefix("torch."))) for member in members)


def score_of(shard: LocalShard, rule: Rule, seed: int | None) -> Scores:
    """Return the scores of one local shard under ``rule``. Local."""
    if rule.method == "random":
        return Random(shard, int(seed or 0), zeros_first=rule.zeros == "first")
    return Magnitude(shard)
