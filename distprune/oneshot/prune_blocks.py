"""One-shot pruning of a decoder, block after block, by any solver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import nn

from distprune.calibration.own_words import samples_of
from distprune.calibration.statistics import EXPERT_MEMORY
from distprune.calibration.token_ids import TokenIds
from distprune.collectives.communicator import Group, communicator
from distprune.hints import with_hints
from distprune.models.decoder_blocks import bare_model, other_blocks
from distprune.models.find_shards import Found, count_parameters
from distprune.oneshot.block import Finished, OnBlock, run_blocks
from distprune.oneshot.driver import prune_rows
from distprune.oneshot.estimate import estimate, explaining_memory
from distprune.oneshot.plan import make_plan
from distprune.oneshot.recipe import BlockRefit, OneShotMethod, Permute, Recipe, Sequential, TargetsOf
from distprune.oneshot.report import Meter, OneShotReport
from distprune.oneshot.solver import Scored, Solver
from distprune.patterns.base import Pattern
from distprune.pruning.agreement import agreeing
from distprune.scores.base import Score
from distprune.scores.random import Random
from distprune.shards.device import fetched
from distprune.shards.local_shard import LocalShard, flat_chunks
from distprune.shards.parts import check_parts


@with_hints
def prune_blocks(
    model: nn.Module,
    samples: TokenIds | Literal["self"],
    sparsity: float | Mapping[str, float] | None = None,
    *,
    method: OneShotMethod | Score | Solver = "admm",
    pattern: Pattern | str = "unstructured",
    seed: int | None = 0,
    sequential: Sequential | None = None,
    targets: TargetsOf | None = None,
    target_share: float | None = None,
    refit: BlockRefit | None = None,
    permute: Permute | None = None,
    epochs: int | None = None,
    group: Group = None,
    offload: bool = False,
    batch_tokens: int | None = None,
    expert_memory: int = EXPERT_MEMORY,
    finished: Finished | None = None,
    on_block: OnBlock | None = None,
) -> OneShotReport:
    """Prune every linear layer in the decoder blocks of ``model`` in place, block by block; return what was done.

    >>> report = prune_blocks(llama, samples, 0.5)
    >>> report.sparsity, sparsity(llama)
    (0.5, 0.5)

    Args:
        model: plain, in DDP, or laid out by FSDP2, HSDP or tensor parallelism.
        samples: token ids, the same on every rank, as :func:`distprune.calibration_windows` returns them; or
            ``"self"``: windows that the model writes.
        sparsity: the share of zeros, or one for each layer by name. ``None``: ``pattern`` says it.
        method: ``"admm"`` (arXiv 2401.02938), ``"sparsegpt"`` (2301.00774), ``"wanda"`` (2306.11695), ``"magnitude"``,
            ``"random"``; or a score or a solver.
        pattern: as of :func:`distprune.prune_model`; each matrix (out, in) by itself, also of a ``Conv1D``.
        seed: of ``"random"`` and ``refit``.
        sequential: ``"block"``: all layers of a block at once; ``"layer"``, with ADMM: in the order they run.
        targets: ``"own"`` outputs of layers, or, with ADMM, the ``"dense"`` model's.
        target_share: how much of the way to dense targets; half by default.
        refit: ``"block"``, with dense targets: blocks are then fitted as a whole; or ``"none"``.
        permute: ``"channels"``, for N:M with dense targets: these move first; or ``"none"``.
        epochs: how often all samples are gone through where blocks are fitted: four times by default.
        group: ranks that take part.
        offload: keep activations on the CPU between blocks.
        batch_tokens: samples of so many tokens run together; by default 8,192 to 65,536, or fewer on the CPU.
        expert_memory: bytes of experts' sums at a time.
        finished: called with each block's number until it returns False; it may load the pruned block.
        on_block: called with each block's number and report.

    Every rank of ``group`` must call it, with equal arguments. Rounds: some 10, and those of each block's statistics,
    ``prune_rows`` and ``fit_block``.

    Raises:
        ValueError, TypeError, NotImplementedError: on every rank, nothing changed: what cannot be pruned so.
        RuntimeError: on every rank, nothing pruned: a forward that changes the model's weights.
        ValueError: on every rank, blocks before pruned: NaN or Inf, of what, and where.
    """
    comm, model = communicator(group), bare_model(model)
    samples = samples_of(comm, model, samples)
    meter = Meter(comm)

    with agreeing(comm) as agreed:
        recipe = Recipe(method, pattern, sparsity, seed, sequential, targets, target_share, refit, permute, epochs)
        plan = make_plan(model, samples, recipe, expert_memory, offload, batch_tokens)
        recipe, solver = plan.recipe, plan.recipe.solver
        assert isinstance(recipe.pattern, Pattern)  # it is resolved
        agreed.found = Found(plan.shards, has_blocks=True, num_parameters=count_parameters(model))
        agreed.facts = {**plan.facts, "finished": repr(finished is not None)}
        if isinstance(solver, Scored):
            agreed.score = solver.score
    plan = replace(plan, shards=agreed.shards())
    check_parts(comm, agreed.roster, lambda: without_nans(plan.shards))
    if isinstance(solver, Scored):
        solver = replace(solver, score=agreed.score)
    walked = *plan.samples.shape, comm.size, batch_tokens, expert_memory
    with explaining_memory(partial(estimate, model, recipe, *walked)):
        return run_blocks(
            meter,
            model,
            plan,
            partial(prune_rows, solver=solver, pattern=recipe.pattern),
            finished=finished,
            on_block=on_block,
            num_parameters=agreed.found.num_parameters,
            method=recipe.method_name,
            pattern=repr(recipe.pattern),
            seed=agreed.score.seed if isinstance(agreed.score, Random) else None,
            other_blocks=tuple(other_blocks(model)),
        )


def without_nans(shards: list[LocalShard]) -> list[LocalShard]:
    """Return ``shards``; raise a ValueError if one holds NaN. Local."""
    has_nans = [values.isnan().any() for shard in shards for _, values in flat_chunks(shard.local)]
    names = [shard.name for shard in shards for _ in flat_chunks(shard.local)]
    for name, has_nan in zip(names, fetched(has_nans), strict=True):
        if has_nan:
            raise ValueError(f"values are NaN in {name!r}; NaN has no place in the order, mend them first")
    return shards
