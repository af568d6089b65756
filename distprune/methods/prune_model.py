"""Prune a model in place, in the layout it is in: scores + selection + zeros."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from distprune.collectives import Communicator, Group, communicator
from distprune.masks import num_zeros_once_pruned, zero_where_pruned
from distprune.methods.agreement import agree_on, settle_owners
from distprune.methods.amount import check_amount, check_seed
from distprune.methods.decide import Candidate, Method, Rule, Scope, decide
from distprune.methods.report import ParameterReport, PruneReport
from distprune.methods.targets import Pattern, find_targets
from distprune.shards import LocalShard

__all__ = ["prune_model", "prune_shards"]

_METHODS: tuple[str, ...] = ("magnitude", "random")
_SCOPES: tuple[str, ...] = ("global", "tensor")


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
    patterns (``fnmatch``) or modules, whose weights are meant. Tied weights count once. What FSDP1 or
    FSDP2 left unsharded after a forward is put back to its shards first.

    Args:
        model: plain, DDP, FSDP1, FSDP2, HSDP, tensor parallel or both, or this rank's stage of a pipeline.
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
        NotImplementedError: on every rank: a ``Partial`` placement.
    """
    comm = communicator(group)
    shards: list[LocalShard] = []
    num_matches: list[int] = []
    error: Exception | None = None
    try:
        shards, num_matches = find_targets(model, include, exclude)
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
    method: Method
    amount: int | float
    scope: Scope
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
        check_seed(self.seed)
        check_amount(self.amount)


def _prune(comm: Communicator, shards: Sequence[LocalShard], request: _Request, error: Exception | None) -> PruneReport:
    started, traffic = time.perf_counter(), comm.traffic.copy()
    if error is None:
        try:
            request.check()
        except (ValueError, TypeError) as caught:
            error = caught
    roster, num_matches = agree_on(comm, shards, request.facts(), error, request.num_matches)
    patterns = itertools.chain.from_iterable(request.patterns.values())
    for pattern, num in zip(patterns, num_matches, strict=True):
        if num == 0:
            raise ValueError(f"the pattern {pattern} matches no parameter of the model")
    if not roster.members:
        raise ValueError("there is no parameter to prune; name some with include")
    settled = settle_owners(comm, shards, roster)
    rule = Rule(request.method, request.amount, request.scope, request.seed, zeros="out" if request.again else "first")
    decision = decide(comm, roster, [Candidate(shard, shard.local) for shard in settled], rule)

    place = roster.index()
    zeros_after = torch.zeros(len(roster.members), dtype=torch.int64)
    for shard, mask in zip(settled, decision.masks, strict=True):
        if shard.owned:
            zeros_after[place[shard.name]] = num_zeros_once_pruned(shard.local, mask)
    num_zeros = comm.sum(zeros_after).tolist()
    # Every collective is behind us: from here on no rank can fail and leave another half done.
    for shard, mask in zip(settled, decision.masks, strict=True):
        zero_where_pruned(shard.local, mask)
    parameters = tuple(
        ParameterReport(
            member.name,
            math.prod(member.global_shape),
            num_zeros[i] - decision.num_zeros[i],
            num_zeros[i],
            decision.thresholds[i],
        )
        for i, member in enumerate(roster.members)
    )
    used = comm.traffic - traffic
    return PruneReport(
        request.method,
        request.scope,
        request.amount,
        decision.seed,
        parameters,
        used.num_rounds,
        used.num_bytes,
        time.perf_counter() - started,
    )


def _shown(pattern: object) -> str:
    return repr(pattern) if isinstance(pattern, str) else f"({type(pattern).__name__})"
