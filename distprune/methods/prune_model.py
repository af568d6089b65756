"""Prune a model in place, in the layout it is in: scores + selection + zeros."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from distprune.collectives import Communicator, Group, Roster, communicator
from distprune.masks import num_zeros_once_pruned, zero_where_pruned
from distprune.methods.agreement import agree_on, settle_owners
from distprune.methods.amount import check_amount, check_seed
from distprune.methods.decide import Candidate, Decision, Method, Rule, Scope, decide
from distprune.methods.patterns import amount_of, check_scope, decide_pattern, fitting_matrix
from distprune.methods.report import ParameterReport, PruneReport
from distprune.methods.within_rows import matrix_of
from distprune.models import NamePattern, find_shards
from distprune.selection import NByM, Pattern, PerRow, Unstructured, check_divides, check_pattern
from distprune.shards import LocalShard

__all__ = ["prune_model", "prune_shards"]

_METHODS: tuple[str, ...] = ("magnitude", "random")
_SCOPES: tuple[str, ...] = ("global", "tensor")


def prune_model(
    model: nn.Module,
    *,
    method: Method,
    amount: int | float | None = None,
    pattern: Pattern | None = None,
    scope: Scope | None = None,
    seed: int | None = None,
    again: bool = False,
    include: Sequence[NamePattern] = (),
    exclude: Sequence[NamePattern] = (),
    group: Group = None,
) -> PruneReport:
    """Prune ``model`` in place, whatever its layout, and return what was done.

    Pruned weights become zero; names, ``state_dict`` keys and forward stay as they are. The result is
    the one a single process with the whole model would get, bit for bit: it depends on the weights and
    on ``method``, ``amount`` or ``pattern``, ``scope`` and ``seed`` alone.

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
        pattern: in place of ``amount``: :class:`NByM` (n of every m inputs stay), :class:`PerRow` (so many of
            every row go), :class:`Block` (whole blocks go, by the sums of their |w|, or their number's hash) or
            :class:`Unstructured` (the same as its amount). Rows are outputs; inputs run along a row: (out, in),
            a convolution's (out, in * kh * kw), and ``Conv1D`` and experts of transformers as they keep theirs.
            Zeros come first here too; a block counts as zero if all of it is.
        scope: ``"global"`` (the default): all parameters compete; ``"tensor"``: each for itself. Not with
            ``NByM`` and ``PerRow``, where every group and every row is for itself.
        seed: for ``"random"``. ``None``: the group's first rank draws one from torch's default generator.
        again: weights that are zero were pruned by an earlier call: they are out, and ``amount`` is of
            what is left (blocks with something left, for ``Block``). Not with ``NByM``, whose n count in all.
        group: the ranks that take part: a process group (default: the default one, or this process
            alone), an mpi4py communicator, or a ``distprune.collectives.Communicator``. It must span
            every rank that holds a part of the model.

    Every rank of ``group`` must call it, with equal arguments. Communicates, in rounds: one to agree,
    one for the census of the weights (32 bytes a parameter), those of ``select_lowest`` (7 for float32,
    6 for bfloat16), one for the report; on pipelines, where ranks hold different parameters, up to six
    more, once. Nothing that travels grows with the number of elements. With ``NByM`` and ``PerRow`` there is
    no selection: three rounds (the census: 40 bytes a parameter) where every rank holds whole groups or
    rows; where shard edges cut some, three more for every 2**24 elements of those, in which a rank hands over
    what it holds of them, at most its shard and 16 bytes a stretch (``distprune/methods/cut_units.py``).
    ``Block``: up to 10 to select, 2 for the scores, and 3 to put together the sums of blocks that shard edges
    cut, 32 bytes each.

    Raises:
        ValueError: on every rank, nothing changed: arguments out of range, unequal on two ranks, or
            ``amount`` more than what is left; both or neither of ``amount`` and ``pattern``, or a ``scope`` or
            ``again`` that does not go with it; a parameter with fewer than two dims, or inputs (or rows) that
            the pattern's groups or blocks do not divide; a name pattern that matches nothing; NaN weights; replicas
            that differ; ranks that list the parameters in different orders or shapes.
        TypeError: on every rank: an argument of the wrong type.
        NotImplementedError: on every rank: a ``Partial`` placement; with a pattern, a parameter of three dims
            or more of which it is not known which are the inputs.
    """
    comm = communicator(group)
    shards: list[LocalShard] = []
    num_matches: list[int] = []
    error: Exception | None = None
    fitting = None if pattern is None or isinstance(pattern, Unstructured) else partial(fitting_matrix, pattern)
    try:
        if pattern is not None:
            check_pattern(pattern)
        shards, num_matches = find_shards(model, include, exclude, fitting)
    except Exception as caught:
        error = caught
    shown = {"include": [*map(_shown, include)], "exclude": [*map(_shown, exclude)]}
    request = _Request(method, amount, pattern, scope, seed, again, shown, num_matches)
    return _prune(comm, shards, request, error)


def prune_shards(
    shards: Sequence[LocalShard],
    *,
    method: Method,
    amount: int | float | None = None,
    pattern: Pattern | None = None,
    scope: Scope | None = None,
    seed: int | None = None,
    again: bool = False,
    group: Group = None,
) -> PruneReport:
    """Prune ``shards`` in place: :func:`prune_model` for parameters whose place only the caller knows.

    For instance rows of a matrix that an MPI program spread by itself: ``LocalShard(name, rows,
    Geometry((8, 3), (((2, 4),), ((0, 3),))), owned=True, num_replicas=1)``. Every rank of ``group``
    must call it, with its own shards in the same order; communication and errors are those of
    :func:`prune_model`. With a ``pattern``, dim 0 is the rows, unless the shard's ``matrix`` says otherwise.
    """
    error: Exception | None = None
    if pattern is not None and not isinstance(pattern, Unstructured):
        try:
            check_pattern(pattern)
            for shard in shards:
                _check_fits(pattern, shard)
        except (ValueError, TypeError) as caught:
            error = caught
    return _prune(communicator(group), shards, _Request(method, amount, pattern, scope, seed, again, {}, []), error)


def _check_fits(pattern: Pattern, shard: LocalShard) -> None:
    shape = shard.geometry.global_shape
    if shard.matrix is None and len(shape) < 2:
        raise ValueError(f"{shard.name!r} of shape {shape} is no matrix: a pattern needs rows and columns")
    matrix = matrix_of(shard)
    if matrix.num_rows * matrix.num_in != shard.geometry.global_numel:
        raise ValueError(f"{shard.name!r} of shape {shape} has not as many elements as its {matrix}")
    check_divides(pattern, shard.name, matrix.num_out, matrix.num_in)


@dataclass(frozen=True)
class _Request:
    method: Method
    amount: int | float | None
    pattern: Pattern | None
    scope: Scope | None
    seed: int | None
    again: bool
    names: Mapping[str, list[str]]  # name patterns by the argument's name, as they are shown
    num_matches: list[int]  # on this rank, of each name pattern, in that order

    def facts(self) -> dict[str, object]:
        """Return what all ranks must agree on, as it is shown when they do not."""
        arguments = ("method", "amount", "pattern", "scope", "seed", "again")
        return {**{name: repr(getattr(self, name)) for name in arguments}, **self.names}

    def check(self) -> None:
        if self.method not in _METHODS:
            raise ValueError(f"method={self.method!r} is none of {_METHODS}")
        if self.scope is not None and self.scope not in _SCOPES:
            raise ValueError(f"scope={self.scope!r} is none of {_SCOPES}")
        check_seed(self.seed)
        if self.pattern is None and self.amount is None:
            raise ValueError("say how many: amount, or pattern")
        if self.pattern is None:
            check_amount(self.amount)
            return
        check_pattern(self.pattern)
        if self.amount is not None:
            raise ValueError(
                f"amount={self.amount!r} and pattern={self.pattern!r} exclude each other; give one of them"
            )
        if self.scope is not None:
            check_scope(self.pattern, self.scope)
        if self.again and isinstance(self.pattern, NByM):
            raise ValueError(
                f"again=True does not go with {self.pattern!r}: it says how many stay in all, zeros or not"
            )

    def rule(self) -> Rule:
        amount = self.amount if self.pattern is None else amount_of(self.pattern)
        assert amount is not None  # checked
        return Rule(self.method, amount, self.scope or "global", self.seed, zeros="out" if self.again else "first")

    def decide(self, comm: Communicator, roster: Roster, candidates: Sequence[Candidate]) -> Decision:
        if self.pattern is None:
            return decide(comm, roster, candidates, self.rule())
        return decide_pattern(comm, roster, candidates, self.pattern, self.rule())


def _prune(comm: Communicator, shards: Sequence[LocalShard], request: _Request, error: Exception | None) -> PruneReport:
    started, traffic = time.perf_counter(), comm.traffic.copy()
    if error is None:
        try:
            request.check()
        except (ValueError, TypeError) as caught:
            error = caught
    roster, num_matches = agree_on(comm, shards, request.facts(), error, request.num_matches)
    names = itertools.chain.from_iterable(request.names.values())
    for name, num in zip(names, num_matches, strict=True):
        if num == 0:
            raise ValueError(f"the pattern {name} matches no parameter of the model")
    if not roster.members:
        raise ValueError("there is no parameter to prune; name some with include")
    settled = settle_owners(comm, shards, roster)
    decision = request.decide(comm, roster, [Candidate(shard, shard.local) for shard in settled])

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
        None if isinstance(request.pattern, NByM | PerRow) else request.scope or "global",
        request.amount if request.pattern is None else getattr(request.pattern, "amount", None),
        None if request.pattern is None else repr(request.pattern),
        decision.seed,
        parameters,
        used.num_rounds,
        used.num_bytes,
        time.perf_counter() - started,
    )


def _shown(pattern: object) -> str:
    return repr(pattern) if isinstance(pattern, str) else f"({type(pattern).__name__})"
