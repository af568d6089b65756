"""Prune a model in place, in the layout it is in: score, choose, apply."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.hints import with_hints
from distprune.masks.in_place import zero_where_pruned
from distprune.masks.reparametrized import mask_of
from distprune.models.find_shards import NamePattern
from distprune.patterns.as_pattern import as_pattern
from distprune.patterns.base import Pattern, Ranked, Scope
from distprune.pruning.agreement import (
    GivenEvidence,
    NamedWeights,
    agreeing,
    checksums,
    choose_masks,
    given_by_name,
    local_evidence,
    with_seed,
)
from distprune.pruning.masks import Masks
from distprune.pruning.present import product_shard
from distprune.pruning.report import ParameterReport, PruneReport
from distprune.scores.as_score import ScoreLike, as_score
from distprune.scores.base import Evidence, LocalScores, Score, local_scores
from distprune.scores.random import Random
from distprune.shards.local_shard import LocalShard


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Let Python not look for cycles while this lasts: thousands of parameters make many objects, and no cycles.

    It would look through all of torch's objects each time: a third of the time of a call.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@with_hints
def prune_model(
    model: nn.Module,
    sparsity: float | Mapping[str, float] | None = None,
    *,
    score: ScoreLike = "magnitude",
    pattern: Pattern | str = "unstructured",
    scope: Scope | None = None,
    seed: int | None = 0,
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

    By default the weights of the layers inside the decoder blocks are pruned, without the output head; in a model
    without decoder blocks, those of all layers. Embeddings, norms, biases, adapters, routers, gates with one output,
    tables and states beside layers (Mamba's ``A_log``), and what is under a parametrization are no weights:
    ``report.left_out`` names them. ``include`` names others instead, ``exclude`` leaves some out. Both take a name
    pattern (``fnmatch``), a module, whose weights are meant, or several of them. Tied weights count once. Parameters
    that FSDP1 or FSDP2 left unsharded after a forward are resharded first.

    Args:
        model: plain, DDP, FSDP1, FSDP2, HSDP, tensor parallel or both, or this rank's stage of a pipeline.
        sparsity: the share of zeros to end with, in [0, 1]. Existing zeros, those of a mask of ``torch.nn.utils.prune``
            among them, count toward it and are pruned first, so pruning to 0.5 twice leaves 0.5. The share is of all
            elements, of each tensor's, of each row's, or of the blocks or channels, as ``scope`` and ``pattern`` say. A
            mapping gives each parameter its own, by name: see :func:`distprune.erk`.
        score: ``"magnitude"`` (the smallest |w| are pruned), ``"random"`` (a hash of seed, parameter and flat index),
            ``"gradient"`` (|g|), ``"taylor"`` (|w g|), a function of weights (1-D) that returns as many scores,
            higher = keep, or a :class:`Score`.
        pattern: :class:`Unstructured`, :class:`PerRow`, :class:`NByM`, :class:`Block`, :class:`Channels`, or a text:
            ``"unstructured"``, ``"row"``, ``"2:4"``, ``"block:16"``, ``"channels:0"``. A pattern that says
            how much is pruned does not take ``sparsity``. Rows are outputs and inputs run along a row: (out, in);
            (out, in * kh * kw) of a convolution; ``Conv1D`` and experts of transformers as their modules use them.
        scope: ``"global"``: all parameters compete; ``"tensor"``: each by itself. By default the pattern's own. N:M
            and rows take no scope: every group and every row is decided by itself.
        seed: for ``"random"``: equal seeds prune equal places. ``None``: every rank draws one from torch's default
            generator; the first rank's is used. ``Random(7)`` keeps its own.
        evidence: what the score needs beside the weights: ``{"gradient": {name: tensor}}``, each of its parameter's
            shape, in its layout, or whole and the same on every rank. Names may be those of the wrapped model, too.
            Without it, gradients are those that the parameters have.
        group: the ranks that take part: a process group (default: the default one, or this process
            alone), an mpi4py communicator, or a ``distprune.collectives.base.Communicator``. It must span
            every rank that holds a part of the model.

    Every rank of ``group`` must call it, with equal arguments. Communicates, in rounds: one to agree, the pattern's
    (see its ``choose``), one for the report (16 bytes a parameter); on pipelines, where ranks hold different
    parameters, up to four more. :class:`Unstructured`: 3 to 6 in all by the dtype of scores, one more where ranks
    hold copies, up to 3 more where ties have to be broken, and more where each of many tensors is decided by itself.
    :class:`NByM` and :class:`PerRow`: 3, on GPUs up to 5; 4 more where shard edges cut groups or rows, 3 for each
    further 8 MiB.
    :class:`Block` and :class:`Channels`: see :meth:`Block.choose`. No message grows with the number of elements, except
    groups, rows, blocks and channels that shard edges cut: at most a shard, and 32 bytes for a block or channel.

    Raises:
        ValueError: on every rank, nothing changed: arguments that are out of range, differ between ranks, or exclude
            each other; a parameter that the pattern does not fit; a name pattern that matches nothing; scores that are
            NaN; replicas that differ; ranks that list parameters in different orders or shapes; evidence that is
            missing, of another shape, of no parameter, or not the same on all ranks; what is under a parametrization
            that does not keep its zeros; parameters that share memory without being tied.
        TypeError: on every rank: an argument of the wrong type.
        NotImplementedError: on every rank: a ``Partial`` placement; with a pattern of rows, groups or blocks, a
            parameter of three dims or more whose input dims are not known.
        Exception: on every rank: what a score of your own raised on one.
    """
    weights = NamedWeights(model, include, exclude)
    return prune_requested(group, Request(weights, sparsity, score, pattern, scope, seed, evidence))


@with_hints
def prune_shards(
    shards: Sequence[LocalShard],
    sparsity: float | Mapping[str, float] | None = None,
    *,
    score: ScoreLike = "magnitude",
    pattern: Pattern | str = "unstructured",
    scope: Scope | None = None,
    seed: int | None = 0,
    evidence: GivenEvidence | None = None,
    group: Group = None,
) -> PruneReport:
    """Prune ``shards`` in place: :func:`prune_model` for parameters whose layout only the caller knows.

    >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # all there are, or those of this rank
    >>> shard = LocalShard("weight", rows, Geometry.rows((2, 2), 0, 2), Ownership())
    >>> report = prune_shards([shard], 0.5)
    >>> rows
    tensor([[0., 0.],
            [3., 4.]])

    For example, rows 2 to 4 of a matrix that an MPI program spread by itself: ``LocalShard(name, rows,
    Geometry.rows((8, 3), 2, 4), Ownership())``. Every rank of ``group`` must call it, with its own
    shards in the same order. Communication and errors are those of :func:`prune_model`. Patterns take dim 0 as the
    rows, unless the shard's ``matrix`` says otherwise.
    """
    return prune_requested(group, Request(NamedWeights(shards), sparsity, score, pattern, scope, seed, evidence))


@with_hints
@_collector_paused()
def compute_masks(
    model: nn.Module,
    sparsity: float | Mapping[str, float] | None = None,
    *,
    score: ScoreLike = "magnitude",
    pattern: Pattern | str = "unstructured",
    scope: Scope | None = None,
    seed: int | None = 0,
    evidence: GivenEvidence | None = None,
    include: NamePattern | Sequence[NamePattern] = (),
    exclude: NamePattern | Sequence[NamePattern] = (),
    group: Group = None,
) -> Masks:
    """Return the masks that :func:`prune_model` would apply; the model stays as it is.

    >>> layer = torch.nn.Linear(4, 4)
    >>> masks = compute_masks(layer, 0.5)
    >>> masks.sparsity(), sparsity(layer)
    (0.5, 0.0)

    Arguments, who must call it, rounds and errors: as :func:`prune_model`.
    """
    weights = NamedWeights(model, include, exclude)
    choosing = Choosing(communicator(group), Request(weights, sparsity, score, pattern, scope, seed, evidence))
    masks, _ = choose_masks(choosing.ranked, choosing.choice)
    return Masks(choosing.ranked.comm, choosing.ranked.roster, choosing.shards, masks)


@dataclass(frozen=True)
class Request:
    """The arguments of a call."""

    weights: NamedWeights
    sparsity: float | Mapping[str, float] | None
    score: ScoreLike
    pattern: Pattern | str
    scope: Scope | None
    seed: int | None
    evidence: GivenEvidence | None = None
    local_evidence: Mapping[str, Evidence] = field(default_factory=dict)  # by parameter, of local shape

    def facts(self) -> dict[str, object]:
        """Return what all ranks must agree on, as it is shown when they do not."""
        score = self.score if isinstance(self.score, str | Score) else getattr(self.score, "__qualname__", "function")
        told = {name: repr(getattr(self, name)) for name in ("sparsity", "pattern", "scope", "seed")}
        return {**told, **self.weights.facts, "score": repr(score), "evidence": sorted(self.evidence or ())}


@_collector_paused()
def prune_requested(group: Group, request: Request) -> PruneReport:
    """Find, agree, choose, and apply. Every rank must call it."""
    choosing = Choosing(communicator(group), request)
    _, counts = choose_masks(choosing.ranked, choosing.choice, in_place=True)
    for shard, pruned in zip(choosing.shards, choosing.ranked.shards(), strict=True):
        mask = mask_of(shard)
        if mask is not None:  # what it prunes stays under it
            zero_where_pruned(shard.local, (pruned.local != 0).logical_or_(mask.logical_not()))
    return choosing.report(counts)


class Choosing:
    """What a call has found, agreed on and chosen. Every rank must make one.

    ``shards``: this rank's. Of a reparametrized parameter the product with its mask is what is chosen from.
    ``shard_of`` maps a found parameter to the shard this rank reads, and sees to it that the ranks' shards fit
    together. Default: unchanged, and checked.
    """

    def __init__(
        self, comm: Communicator, request: Request, shard_of: Callable[[Pattern, LocalShard], LocalShard] | None = None
    ) -> None:
        self._started, self._traffic = time.perf_counter(), comm.traffic.copy()
        given: dict[str, dict[str, torch.Tensor]] = {}  # evidence, by the parameter's name here
        with agreeing(comm) as agreed:
            agreed.score = with_seed(as_score(request.score), request.seed)
            pattern = as_pattern(request.pattern, request.sparsity, request.scope)
            found = request.weights.find_for(pattern)
            pattern = as_pattern(request.pattern, found.by_name(request.sparsity), request.scope)
            if request.evidence is not None:
                given = given_by_name(request.evidence, found)
                found = dataclasses.replace(found, evidence=checksums(given, found.shards))
            if shard_of is not None:
                found = dataclasses.replace(found, shards=[shard_of(pattern, shard) for shard in found.shards])
            agreed.found, agreed.facts = found, request.facts()
        agreed.check_found()

        shards: list[LocalShard] = []

        # Not a method, which would keep all of the call, and the model, until Python looks for cycles.
        def make_scores() -> list[LocalScores]:
            shards[:], evidence = agreed.shards(), request.local_evidence
            agreed.check_shares(pattern)
            if given or agreed.score.needs:
                model = request.weights.model if isinstance(request.weights.model, nn.Module) else None
                evidence = local_evidence(agreed, shards, given, evidence, model)
            return local_scores(agreed.score, [*map(product_shard, shards)], evidence, zeros_are_gone=True)

        self.pattern, self._agreed, self.shards = pattern, agreed, shards
        self.ranked = Ranked(comm, agreed.roster, agreed.score, make_scores, checks=shard_of is None)
        self.choice = self.ranked.choose(pattern)

    def report(self, counts: Sequence[Sequence[int]], *, reads: bool = True) -> PruneReport:
        """Return what was done; ``counts``: of every member, over all ranks, zeros and zeros before. Local.

        Its masks are read from the weights when they are asked for; unless it ``reads``, there are none.
        """
        ranked = self.ranked
        used = ranked.comm.traffic - self._traffic
        members = zip(ranked.roster.members, ranked.numels, counts, self.choice.thresholds, strict=True)
        return PruneReport(
            ranked.score.name,
            repr(self.pattern),
            ranked.score.seed if isinstance(ranked.score, Random) else None,
            tuple([ParameterReport(one.name, numel, new - old, new, last) for one, numel, (new, old), last in members]),
            used.num_rounds,
            used.num_bytes,
            time.perf_counter() - self._started,
            self._agreed.found.num_parameters,
            partial(Masks.read, ranked.comm, ranked.roster, self.shards if reads else []),
            dict(self._agreed.found.left_out),
        )
