"""Prune a model in place, in the layout it is in: score, choose, apply."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from distprune.collectives import Communicator, Group, Traffic, communicator, sum_together
from distprune.masks import zero_where_pruned
from distprune.models import Found, NamePattern, find_shards
from distprune.patterns import Pattern, Ranked, Scope, as_pattern
from distprune.pruning.agreement import Agreed, agree_on, all_shown, check_seed
from distprune.pruning.fitting import fitted
from distprune.pruning.masks import Masks
from distprune.pruning.report import ParameterReport, PruneReport
from distprune.scores import Evidence, Magnitude, Random, Score, ScoreLike, as_score, count_unread_nans, local_scores
from distprune.selection import Chosen, raise_nans
from distprune.shards import LocalShard, local_part

__all__ = ["GivenEvidence", "compute_masks", "prune_model", "prune_shards"]

GivenEvidence = Mapping[str, Mapping[str, torch.Tensor]]  # by evidence, then by parameter


def prune_model(
    model: nn.Module,
    sparsity: float | None = None,
    *,
    score: ScoreLike = "magnitude",
    pattern: Pattern | str | None = None,
    scope: Scope | None = None,
    seed: int | None = None,
    evidence: GivenEvidence | None = None,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
    group: Group = None,
) -> PruneReport:
    """Prune ``model`` in place, whatever its layout, and return what was done.

    >>> report = prune_model(torch.nn.Linear(8, 8), 0.5)
    >>> report.sparsity
    0.5

    Pruned weights become zero. Names, ``state_dict`` keys and forward stay as they are. The result depends on the
    weights and the arguments alone: a single process with the whole model gets the same, bit for bit.

    By default the weights of the layers inside the decoder blocks are pruned, without embeddings, norms, biases and
    the output head; in a model without decoder blocks, the weights of all layers but embeddings. ``include`` names
    others instead, ``exclude`` leaves some out. Both take a name pattern (``fnmatch``), a module, whose weights are
    meant, or several of them. Tied weights count once. Parameters that FSDP1 or FSDP2 left unsharded after a forward
    are resharded first.

    Args:
        model: plain, DDP, FSDP1, FSDP2, HSDP, tensor parallel or both, or this rank's stage of a pipeline.
        sparsity: the share of zeros to end with, in [0, 1]. Existing zeros count toward it and are pruned first, so
            pruning to 0.5 twice leaves 0.5. The share is of all elements, of each tensor's, of each row's, or of the
            blocks or channels, as ``scope`` and ``pattern`` say.
        score: ``"magnitude"`` (the smallest |w| are pruned), ``"random"`` (a hash of seed, parameter and flat index),
            a function of weights (1-D) that returns as many scores, higher = keep, or a :class:`Score`.
        pattern: :class:`Unstructured` (the default), :class:`PerRow`, :class:`NByM`, :class:`Block`,
            :class:`Channels`, or a text: ``"row"``, ``"2:4"``, ``"block:16"``, ``"channels:0"``. A pattern that says
            how much is pruned does not take ``sparsity``. Rows are outputs and inputs run along a row: (out, in);
            (out, in * kh * kw) of a convolution; ``Conv1D`` and experts of transformers as their modules use them.
        scope: ``"global"``: all parameters compete; ``"tensor"``: each by itself. By default the pattern's own. N:M
            and rows take no scope: every group and every row is decided by itself.
        seed: for ``"random"``. ``None``: every rank draws one from torch's default generator; the first rank's is used.
        evidence: what the score needs beside the weights: ``{"gradient": {name: tensor}}``, each in its
            parameter's layout, or whole on every rank.
        group: the ranks that take part: a process group (default: the default one, or this process
            alone), an mpi4py communicator, or a ``distprune.collectives.Communicator``. It must span
            every rank that holds a part of the model.

    Every rank of ``group`` must call it, with equal arguments. Communicates, in rounds: one to agree, the pattern's
    (see its ``choose``), one for the report (16 bytes a parameter); on pipelines, where ranks hold different
    parameters, up to five more, once. :class:`Unstructured`: 6 in float32, 5 in bfloat16, up to 3 more where ties have
    to be broken. :class:`NByM` and :class:`PerRow`: 3, and 3 more for every 2**24 elements of groups or rows that shard
    edges cut. :class:`Block`: up to 16. No message grows with the number of elements, except groups, rows and blocks
    that shard edges cut: at most a shard.

    Raises:
        ValueError: on every rank, nothing changed: arguments that are out of range, differ between ranks, or exclude
            each other; a parameter that the pattern does not fit; a name pattern that matches nothing; scores that are
            NaN; replicas that differ; ranks that list parameters in different orders or shapes; missing evidence.
        TypeError: on every rank: an argument of the wrong type.
        NotImplementedError: on every rank: a ``Partial`` placement; with a pattern of rows, groups or blocks, a
            parameter of three dims or more whose input dims are not known.
        Exception: on every rank: what a score of your own raised on one.
    """
    started, comm = time.perf_counter(), communicator(group)
    traffic = comm.traffic.copy()
    request = _Request(sparsity, score, pattern, scope, seed, evidence, include, exclude)
    return _pruned(comm, request, lambda: find_shards(model, include, exclude), started, traffic)


def prune_shards(
    shards: Sequence[LocalShard],
    sparsity: float | None = None,
    *,
    score: ScoreLike = "magnitude",
    pattern: Pattern | str | None = None,
    scope: Scope | None = None,
    seed: int | None = None,
    evidence: GivenEvidence | None = None,
    group: Group = None,
) -> PruneReport:
    """Prune ``shards`` in place: :func:`prune_model` for parameters whose layout only the caller knows.

    For example, rows 2 to 4 of a matrix that an MPI program spread by itself: ``LocalShard(name, rows,
    Geometry.rows((8, 3), 2, 4), owned=True, num_replicas=1)``. Every rank of ``group`` must call it, with its own
    shards in the same order. Communication and errors are those of :func:`prune_model`. Patterns take dim 0 as the
    rows, unless the shard's ``matrix`` says otherwise.
    """
    started, comm = time.perf_counter(), communicator(group)
    traffic = comm.traffic.copy()
    request = _Request(sparsity, score, pattern, scope, seed, evidence, (), ())
    return _pruned(comm, request, lambda: Found(list(shards), [], by_default=False, has_blocks=False), started, traffic)


def compute_masks(
    model: nn.Module,
    sparsity: float | None = None,
    *,
    score: ScoreLike = "magnitude",
    pattern: Pattern | str | None = None,
    scope: Scope | None = None,
    seed: int | None = None,
    evidence: GivenEvidence | None = None,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
    group: Group = None,
) -> Masks:
    """Return the masks that :func:`prune_model` would apply; the model stays as it is.

    Arguments, who must call it, rounds and errors: as :func:`prune_model`.
    """
    request = _Request(sparsity, score, pattern, scope, seed, evidence, include, exclude)
    outcome = _choose(communicator(group), request, lambda: find_shards(model, include, exclude))
    return outcome.masks()


@dataclass(frozen=True)
class _Request:
    """The arguments of a call."""

    sparsity: float | None
    score: ScoreLike
    pattern: Pattern | str | None
    scope: Scope | None
    seed: int | None
    evidence: GivenEvidence | None
    include: NamePattern | Sequence[NamePattern]
    exclude: NamePattern | Sequence[NamePattern]

    def facts(self) -> dict[str, object]:
        """Return what all ranks must agree on, as it is shown when they do not."""
        arguments = ("sparsity", "pattern", "scope", "seed")
        score = self.score if isinstance(self.score, str | Score) else getattr(self.score, "__qualname__", "function")
        return {
            **{name: repr(getattr(self, name)) for name in arguments},
            "score": repr(score),
            "evidence": sorted(self.evidence or ()),
            **{name: all_shown(getattr(self, name)) for name in ("include", "exclude")},
        }

    def checked(self) -> tuple[Score, Pattern]:
        """Return the score and the pattern that are meant, or raise."""
        check_seed(self.seed)
        score = as_score(self.score)
        if isinstance(score, Random) and self.seed is not None:
            score = Random(self.seed)
        return score, as_pattern(self.pattern, self.sparsity, self.scope)


@dataclass(frozen=True)
class _Outcome:
    """What a call chose: for each of this rank's shards, and counts by member over all ranks."""

    agreed: Agreed
    pattern: Pattern
    shards: list[LocalShard]
    chosen: list[Chosen]
    num_zeros: list[int]
    num_pruned: list[int]
    thresholds: list[float | int | None]

    def masks(self) -> Masks:
        return Masks(self.agreed.comm, self.agreed.roster, self.shards, [each.mask for each in self.chosen])


def _choose(comm: Communicator, request: _Request, find: Callable[[], Found]) -> _Outcome:
    """Find, agree and choose: nothing changes. Every rank must call it."""
    found, error = Found([], [], by_default=False, has_blocks=False), None
    score: Score = Magnitude()
    pattern: Pattern | None = None
    try:
        score, pattern = request.checked()
        found = find()
        found = dataclasses.replace(found, shards=[fitted(pattern, shard, shard.name) for shard in found.shards])
    except Exception as caught:
        error = caught
    agreed = agree_on(comm, found, request.facts() if error is None else {}, score, error)
    agreed.check_found()
    assert pattern is not None  # no error
    ranked = Ranked(
        comm,
        agreed.roster,
        agreed.score,
        lambda: local_scores(agreed.score, shards := agreed.shards(), _evidence(request, shards), in_place=True),
    )
    choice = pattern.choose(ranked)
    chosen: list[Chosen] = []
    num_nans: dict[str, int] = {}

    def count(words: torch.Tensor) -> None:
        chosen[:] = choice.settle()
        totals = words[1:].view(-1, 2)
        unread_nans = count_unread_nans(ranked.scores)
        for scores, each, num_unread in zip(ranked.scores, chosen, unread_nans, strict=True):
            if scores.shard.owned:
                totals[ranked.place[scores.shard.name]] = torch.tensor([each.num_pruned, each.num_gone])
                num_nans[scores.shard.name] = each.num_nans + num_unread
                words[0] += num_nans[scores.shard.name]

    words = sum_together(comm, (1 + 2 * len(agreed.roster.members),), count)
    if words[0]:
        raise_nans(comm, num_nans)
    num_zeros, num_gone = words[1:].view(-1, 2).t().tolist() if len(words) > 1 else ([], [])
    num_pruned = [after - before for after, before in zip(num_zeros, num_gone, strict=True)]
    shards = [scores.shard for scores in ranked.scores]
    return _Outcome(agreed, pattern, shards, chosen, num_zeros, num_pruned, choice.thresholds)


def _pruned(
    comm: Communicator, request: _Request, find: Callable[[], Found], started: float, traffic: Traffic
) -> PruneReport:
    outcome = _choose(comm, request, find)
    # The last collective is done: an error from here on leaves no other rank waiting.
    for shard, each in zip(outcome.shards, outcome.chosen, strict=True):
        if each.num_pruned > each.num_gone:
            zero_where_pruned(shard.local, each.mask)
    parameters = tuple(
        ParameterReport(member.name, math.prod(member.global_shape), pruned, zeros, threshold)
        for member, pruned, zeros, threshold in zip(
            outcome.agreed.roster.members, outcome.num_pruned, outcome.num_zeros, outcome.thresholds, strict=True
        )
    )
    used, score = comm.traffic - traffic, outcome.agreed.score
    return PruneReport(
        score.name,
        repr(outcome.pattern),
        score.seed if isinstance(score, Random) else None,
        parameters,
        used.num_rounds,
        used.num_bytes,
        time.perf_counter() - started,
        outcome.masks(),
    )


def _evidence(request: _Request, shards: Sequence[LocalShard]) -> dict[str, Evidence]:
    """Return the local part of the evidence by shard."""
    given = request.evidence or {}
    return {
        shard.name: {
            name: local_part(of_name[shard.name], shard.tensor, shard, f"evidence {name!r} of {shard.name!r}")
            for name, of_name in given.items()
            if shard.name in of_name
        }
        for shard in shards
    }
