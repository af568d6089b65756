"""Prune a model in place, in the layout it is in: scores + selection + zeros."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from distprune.collectives import (
    Communicator,
    Group,
    Member,
    Roster,
    agree,
    communicator,
    roster_of_all,
    roster_of_one,
    same_everywhere,
)
from distprune.masks import num_zeros_once_pruned, zero_where_pruned
from distprune.methods.amount import check_amount, num_to_prune
from distprune.methods.report import ParameterReport, PruneReport
from distprune.methods.targets import Pattern, find_targets, release_unsharded
from distprune.scores import Magnitude, Random
from distprune.selection import Competition, Entry, NonZero, Order, Scores, common_order, select_lowest
from distprune.shards import LocalShard, is_held, local_shard, take_census

__all__ = ["prune_model", "prune_shards"]

Method = Literal["magnitude", "random"]
Scope = Literal["global", "tensor"]

_METHODS: tuple[str, ...] = ("magnitude", "random")
_SCOPES: tuple[str, ...] = ("global", "tensor")
_NUM_CENSUS_WORDS = 4  # NaNs, zeros, owned elements, how far replicas differ


def prune_model(
    model: nn.Module,
    *,
    method: Method,
    amount: int | float,
    scope: Scope = "global",
    seed: int | None = None,
    again: bool = False,
    include: Sequence[Pattern] = (),
    exclude: Sequence[Pattern] = (),
    group: Group = None,
) -> PruneReport:
    """Prune ``model`` in place, whatever its layout, and return what was done.

    Pruned weights become zero; names, ``state_dict`` keys and forward stay as they are. The result is
    the one a single process with the whole model would get, bit for bit: it depends on the weights and
    on ``method``, ``amount``, ``scope`` and ``seed`` alone.

    Which parameters take part: by default the weights of the layers inside the decoder blocks, without
    embeddings, norms, biases and the output head (in a model without decoder blocks, the weights of all
    its layers but embeddings). ``include`` names others instead, ``exclude`` leaves some out: name
    patterns (``fnmatch``) or modules, whose weights are meant. Tied weights count once. FSDP2 modules
    that are still unsharded after a forward are put back to their shards first.

    Args:
        model: plain, DDP, FSDP2, HSDP, tensor parallel or both, or this rank's stage of a pipeline.
        method: ``"magnitude"`` prunes the smallest |w|, ``"random"`` by a hash of (seed, parameter,
            flat index).
        amount: an int is that many, a float that fraction, rounded by ``round()``; of all elements, or of
            each tensor's with ``scope="tensor"``. Weights that are zero already come first, so that so many
            are zero afterwards (more only if more were before).
        scope: ``"global"``: all parameters compete; ``"tensor"``: each for itself.
        seed: for ``"random"``. ``None``: the group's first rank draws one from torch's default generator.
        again: weights that are zero were pruned by an earlier call: they are out, and ``amount`` is of
            what is left.
        group: the ranks that take part: a process group (default: the default one, or this process
            alone), an mpi4py communicator, or a ``distprune.collectives.Communicator``. It must span
            every rank that holds a part of the model.

    Every rank of ``group`` must call it, with equal arguments. Communicates, in rounds: one to agree,
    one for the census of the weights (32 bytes a parameter), those of ``select_lowest`` (7 for float32,
    6 for bfloat16), one for the report; on pipelines, where ranks hold different parameters, up to six
    more, once. Nothing that travels grows with the number of elements.

    Raises:
        ValueError: on every rank, nothing changed: arguments out of range, unequal on two ranks, or
            ``amount`` more than what is left; a pattern that matches nothing; NaN weights; replicas
            that differ; ranks that list the parameters in different orders or shapes.
        TypeError: on every rank: an argument of the wrong type.
        NotImplementedError: on every rank: a ``Partial`` placement, or FSDP1.
    """
    comm = communicator(group)
    shards: list[LocalShard] = []
    num_matches: list[int] = []
    error: Exception | None = None
    try:
        release_unsharded(model)
        targets, num_matches = find_targets(model, include, exclude)
        shards = [local_shard(name, parameter) for name, parameter in targets.items() if is_held(parameter)]
    except Exception as caught:
        error = caught
    shown = {"include": [*map(_shown, include)], "exclude": [*map(_shown, exclude)]}
    request = _Request(method, amount, scope, seed, again, shown, num_matches)
    return _prune(comm, shards, request, error)


def prune_shards(
    shards: Sequence[LocalShard],
    *,
    method: Method,
    amount: int | float,
    scope: Scope = "global",
    seed: int | None = None,
    again: bool = False,
    group: Group = None,
) -> PruneReport:
    """Prune ``shards`` in place: :func:`prune_model` for parameters whose place only the caller knows.

    For instance rows of a matrix that an MPI program spread by itself: ``LocalShard(name, rows,
    Geometry((8, 3), (((2, 4),), ((0, 3),))), owned=True, num_replicas=1)``. Every rank of ``group``
    must call it, with its own shards in the same order; communication and errors are those of
    :func:`prune_model`.
    """
    return _prune(communicator(group), shards, _Request(method, amount, scope, seed, again, {}, []), None)


@dataclass(frozen=True)
class _Request:
    method: str
    amount: int | float
    scope: str
    seed: int | None
    again: bool
    patterns: Mapping[str, list[str]]  # by the argument's name, as they are shown
    num_matches: list[int]  # on this rank, of each pattern, in that order

    def facts(self) -> dict[str, object]:
        """Return what all ranks must agree on, as it is shown when they do not."""
        arguments = ("method", "amount", "scope", "seed", "again")
        return {**{name: repr(getattr(self, name)) for name in arguments}, **self.patterns}

    def check(self) -> None:
        if self.method not in _METHODS:
            raise ValueError(f"method={self.method!r} is none of {_METHODS}")
        if self.scope not in _SCOPES:
            raise ValueError(f"scope={self.scope!r} is none of {_SCOPES}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise TypeError(f"seed must be an int or None, not {self.seed!r}")
        check_amount(self.amount)


@dataclass(frozen=True)
class _Census:
    """Over all ranks, per member of the roster."""

    num_zeros: list[int]
    seed: int | None


def _prune(comm: Communicator, shards: Sequence[LocalShard], request: _Request, error: Exception | None) -> PruneReport:
    started, traffic = time.perf_counter(), comm.traffic.copy()
    if error is None:
        try:
            request.check()
        except (ValueError, TypeError) as caught:
            error = caught
    roster = _agree(comm, shards, request, error)
    place = roster.index()
    settled = [_settled(comm, shard, roster, place[shard.name]) for shard in shards]
    census = _take_census(comm, roster, settled, request)
    competitions, competition_of, first_position = _competitions(roster, census, request)
    entries = [
        Entry(
            shard.name,
            _scores(shard, request, census.seed),
            shard.geometry,
            bool(shard.owned),
            competition_of[i],
            first_position[i],
            NonZero(shard.local) if request.again and census.num_zeros[i] else None,
        )
        for shard, i in ((shard, place[shard.name]) for shard in settled)
    ]
    selection = select_lowest(comm, competitions, entries)

    zeros = torch.zeros(len(roster.members), dtype=torch.int64)
    for shard, mask in zip(settled, selection.masks, strict=True):
        if shard.owned:
            zeros[place[shard.name]] = num_zeros_once_pruned(shard.local, mask)
    num_zeros = comm.sum(zeros).tolist()
    # Every collective is behind us: from here on no rank can fail and leave another half done.
    for shard, mask in zip(settled, selection.masks, strict=True):
        zero_where_pruned(shard.local, mask)
    parameters = tuple(
        ParameterReport(
            member.name,
            math.prod(member.global_shape),
            num_zeros[i] - census.num_zeros[i],
            num_zeros[i],
            selection.thresholds[competition_of[i]],
        )
        for i, member in enumerate(roster.members)
    )
    used = comm.traffic - traffic
    return PruneReport(
        request.method,
        request.scope,
        request.amount,
        census.seed,
        parameters,
        used.num_rounds,
        used.num_bytes,
        time.perf_counter() - started,
    )


def _settled(comm: Communicator, shard: LocalShard, roster: Roster, index: int) -> LocalShard:
    first_holder = comm.global_rank(roster.first_holder[index])
    return shard.owned_by(comm.global_rank(comm.rank), first_holder, roster.num_holders[index])


def _agree(comm: Communicator, shards: Sequence[LocalShard], request: _Request, error: Exception | None) -> Roster:
    """Return the roster, or raise on all ranks: one round where all ranks say the same."""
    members = [Member(s.name, s.geometry.global_shape, str(s.local.dtype)) for s in shards]
    described = [[m.name, list(m.global_shape), m.dtype] for m in members]
    said = [request.facts(), request.num_matches, described]
    all_same, any_failed = same_everywhere(comm, said, failed=error is not None)
    if all_same and not any_failed:
        roster, num_matches = roster_of_one(comm, members), request.num_matches
    else:
        agree(comm, request.facts(), error)
        roster = roster_of_all(comm, members)
        num_matches = comm.sum(torch.tensor(request.num_matches, dtype=torch.int64)).tolist()
    patterns = itertools.chain.from_iterable(request.patterns.values())
    for pattern, num in zip(patterns, num_matches, strict=True):
        if num == 0:
            raise ValueError(f"the pattern {pattern} matches no parameter of the model")
    if not roster.members:
        raise ValueError("there is no parameter to prune; name some with include")
    return roster


def _take_census(comm: Communicator, roster: Roster, shards: Sequence[LocalShard], request: _Request) -> _Census:
    """Count NaNs and zeros over all ranks (one round), and see that ranks' parts fit together."""
    words = torch.zeros((len(roster.members) + 1, _NUM_CENSUS_WORDS), dtype=torch.int64)
    place = roster.index()
    for shard in shards:
        census = take_census(shard)
        row = words[place[shard.name]]
        if shard.owned:
            row[:3] = torch.tensor([census.num_nans, census.num_zeros, shard.geometry.local_numel])
        # The owner's checksum, once for every copy, less the copies': zero if all are equal.
        weight = (shard.num_replicas or 1) - 1 if shard.owned else -1
        row[3] = _wrapped(weight * census.checksum)
    seed = request.seed
    draws = request.method == "random" and seed is None
    if draws and comm.rank == 0:
        words[-1, 0] = torch.randint(1 << 62, ())
    words = comm.sum(words)
    if draws:
        seed = int(words[-1, 0])
    nans = [(m.name, int(row[0])) for m, row in zip(roster.members, words, strict=False) if row[0]]
    if nans:
        shown = ", ".join(f"{name!r} ({num_nans})" for name, num_nans in nans)
        raise ValueError(f"weights are NaN in {shown}; NaN has no place in the order, mend the model first")
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
                "in step, or give parameters of different pipeline stages different names"
            )
    return _Census([int(row[1]) for row in words[:-1]], seed)


def _wrapped(number: int) -> int:
    """Return ``number`` modulo 2**64 as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _competitions(roster: Roster, census: _Census, request: _Request) -> tuple[list[Competition], list[int], list[int]]:
    """Return the competitions, and for every member which one it is in and its first position there."""
    numels = [math.prod(member.global_shape) for member in roster.members]
    unpruned = [numel - zeros * request.again for numel, zeros in zip(numels, census.num_zeros, strict=True)]
    orders = [_score_order([member], request.method) for member in roster.members]
    if request.scope == "tensor":
        competitions = [
            Competition(member.name, order, numel, left, num_to_prune(request.amount, left, repr(member.name)))
            for member, order, numel, left in zip(roster.members, orders, numels, unpruned, strict=True)
        ]
        return competitions, list(range(len(numels))), [0] * len(numels)
    left = sum(unpruned)
    num_lowest = num_to_prune(request.amount, left, "all parameters together")
    order = _score_order(roster.members, request.method)
    whole = Competition("all parameters together", order, sum(numels), left, num_lowest)
    return [whole], [0] * len(numels), list(itertools.accumulate(numels, initial=0))[:-1]


def _score_order(members: Sequence[Member], method: str) -> Order:
    if method == "random":
        return common_order([("value", torch.int32)])
    return common_order(("magnitude", getattr(torch, member.dtype.removeprefix("torch."))) for member in members)


def _scores(shard: LocalShard, request: _Request, seed: int | None) -> Scores:
    if request.method == "random":
        return Random(shard, int(seed or 0), zeros_first=not request.again)
    return Magnitude(shard)


def _shown(pattern: object) -> str:
    return repr(pattern) if isinstance(pattern, str) else f"({type(pattern).__name__})"
