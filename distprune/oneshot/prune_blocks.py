"""One-shot pruning of a decoder, block after block, by any solver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import nn

from distprune.calibration.data import tokens_together
from distprune.calibration.own_words import samples_of
from distprune.calibration.sample_group import find_sample_group
from distprune.calibration.statistics import EXPERT_MEMORY
from distprune.calibration.token_ids import TokenIds
from distprune.collectives.communicator import Group, communicator
from distprune.hints import with_hints
from distprune.models.decoder_blocks import other_blocks
from distprune.models.find_shards import Found, count_parameters
from distprune.oneshot.block import Finished, OnBlock, run_blocks
from distprune.oneshot.driver import prune_rows
from distprune.oneshot.plan import make_plan
from distprune.oneshot.recipe import BlockRefit, OneShotMethod, Permute, Recipe, Sequential, TargetsOf
from distprune.oneshot.report import Meter, OneShotReport
from distprune.oneshot.room import check_room
from distprune.oneshot.scored import Scored
from distprune.oneshot.solver import Solver
from distprune.patterns.base import Pattern
from distprune.patterns.census import check_parts
from distprune.pruning.agreement import agreeing
from distprune.scores.base import Score
from distprune.scores.random import Random
from distprune.shards.device import fetched
from distprune.shards.local_shard import LocalShard, flat_chunks


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
    group: Group = None,
    offload: bool = False,
    batch_tokens: int | None = None,
    expert_memory: int = EXPERT_MEMORY,
    finished: Finished | None = None,
    on_block: OnBlock | None = None,
) -> OneShotReport:
    """Prune every linear layer in the decoder blocks of ``model`` in place, and return what was done.

    >>> report = prune_blocks(llama, samples, 0.5)
    >>> report.sparsity, sparsity(llama)
    (0.5, 0.5)

    Block by block, as the papers do: the calibration samples run through the block, the statistics of
    what each layer is given are summed over the ranks, the block is pruned, and what it then puts out is what
    the next one is given. Embeddings and the output head stay; norms and biases, too, unless blocks are refitted.
    Each rank runs its part of the samples; N ranks come to what one rank with all samples comes to, but for rounding.
    A layer that the pattern does not fit (2:4 of the 2 inputs of a small Mamba's ``dt_proj``), or that no token reaches
    and is no expert, stays dense: the report names it with the reason, and a warning does.

    Args:
        model: plain, the same on all ranks; FSDP2 or HSDP (``fully_shard`` on each block and the root); tensor
            parallel (``parallelize_module``), alone or under FSDP2. Ranks of one tensor-parallel group run the
            same samples, which is read off the layout, and hidden states are whole on each between blocks.
        samples: token ids, the same on every rank: a tensor (num_samples, length), lists of ints, what a tokenizer
            returns, or a ``DataLoader`` of these. Padding that an ``attention_mask`` leaves out is dropped, and samples
            of unequal length are joined and cut into windows as long as the longest. Of text and files:
            :func:`distprune.calibration_windows`.
            Or ``"self"``: 128 windows that the model writes first, of 2,048 tokens or of all its positions, by
            :func:`distprune.own_words` with seed 0.
        sparsity: the share of zeros each layer ends with, or one for each layer by its name in the report, or by its
            parameter's, as :func:`distprune.allocate` and :func:`distprune.erk` give them. ``None``: ``pattern`` says
            it.
        method: ``"admm"`` (arXiv 2401.02938) and ``"sparsegpt"`` (arXiv 2301.00774), which update the weights that
            stay, ``"wanda"`` (arXiv 2306.11695), or ``"magnitude"`` and ``"random"`` by the same walk; or a score or a
            solver of one's own.
        pattern: ``Unstructured``, ``PerRow``, ``NByM`` or ``Block``, or its text, such as ``"2:4"``; see there who
            competes. Each matrix is pruned by itself.
        seed: for ``"random"``, as for ``prune_model``, and for the order of samples in ``refit``.
        sequential: ``"block"``: all layers of a block are pruned at once, as Wanda and SparseGPT do; ``"layer"``: one
            after the other in the order they run, by what they are given once those before are pruned. Default:
            ``"layer"`` for ``"admm"``, ``"block"`` for the others.
        targets: what layers are to put out: ``"own"``, what their weights make of what they are given; or ``"dense"``,
            what the model before pruning put out, to which the weights are moved part of the way before any goes
            (see ``oneshot.retarget``). Default: ``"dense"`` for ``"admm"``, ``"own"`` for the others.
        target_share: how much of that way, above 0 and at most 1; half of it by default.
        refit: ``"block"``: each block is fitted as a whole once its layers are pruned, over the weights that stay and
            its 1-D parameters, norms and biases, to what the dense model puts out there (see ``oneshot.block_fit``);
            experts with the rest. Or ``"none"``. Default: ``"block"`` with dense targets.
        permute: ``"channels"``, for N:M: before a block is pruned, the channels of its MLP change places, and values
            within each key and value head, so that the layers that read them keep more (see
            ``oneshot.channel_order``). Layers in front have other rows then, and the block puts out the same. What
            knows channels by their numbers must be made afterwards: optimizers, masks, caches. Experts keep theirs, and
            so does a block whose channels are not each other's like. The order follows from what a block is given: on a
            GPU, or another number of ranks, that is rounded otherwise and may give another order. It needs scipy. Or
            ``"none"``. Default: ``"channels"`` for N:M with dense targets.
        group: the ranks that take part, as for ``prune_model``; it must span all that hold a part.
        offload: keep activations on the CPU between blocks, and the tokens of experts until they are sent.
        batch_tokens: samples that make so many tokens run together, or one: by default 8,192, of wide models on the CPU
            fewer. The result depends on it but for rounding.
        expert_memory: bytes of the sums X^T X of experts that a rank has at a time, 4 GiB by default. SparseGPT, ADMM
            and dense targets need them: the tokens of each expert then go to a rank that holds it, which sums them,
            and the experts are pruned in as many waves as that takes. The result does not depend on it.
        finished: called with the number of each block in turn, on every rank, until it returns False, the same on
            all: it writes the weights that an earlier call came to into the block and returns True, or leaves it. For
            what it raises ``on_block``'s rules hold.
        on_block: called with the number of a block and its report after each block, before the next one is touched,
            for instance to write it, on the ranks that pass it; the walk has then run it once more, pruned. What it
            raises on one rank is raised on all; one that communicates handles its own failures.

    Every rank of ``group`` must call it, with equal arguments. In memory at a time, beyond the model's shards: this
    rank's share of the activations between two blocks, with dense targets twice, and of one block what its layers are
    given or add to in the dense model (about four times as much in a Llama); the statistics of the layers that are
    pruned at once, of experts the tokens that this rank's samples give them, and ``expert_memory`` (and of factors and
    float32 rows those that this rank works on, at most twice its share); and one block as its forward needs it:
    unsharded by FSDP2, cut by tensor parallelism.
    Rounds: 7 for the whole (4 more where ranks hold different parameters, 2 where some share their samples), and 1 for
    each of this rank's batches; 3 for each kind of block, to learn in which order it runs its layers, where that is
    asked for; for a block 1, with dense targets 2, with ``on_block`` 1 more; with ``refit`` those of ``fit_block``;
    with ``permute`` those of ``InputStatistics.reduce`` and ``order_channels``; and for the layers that are pruned at
    once those of ``InputStatistics.reduce``, of ``prune_rows``, and of ``whole_rows``.
    Under tensor parallelism inputs of row-wise layers are gathered, one round a sample each, but for what Wanda needs.

    Raises:
        ValueError: on every rank, nothing changed: arguments out of range or unequal on two ranks; a
            block with no linear layer that the pattern fits; samples that do not fit the model; NaN weights;
            no decoder blocks; a model that changes hidden states between blocks; a device that has far less memory
            than the walk takes (see ``plan_walk``). On every rank, with the blocks
            before pruned: NaN or Inf in the activations (it names the block and the layer), or ``finished`` that
            returns True on some ranks alone; with that block's weights
            changed, too: new weights that are not finite, or what the pruned block then puts out. The last block is
            not run again.
        TypeError: on every rank, nothing changed: an argument of the wrong type.
        RuntimeError: on every rank, nothing pruned: a forward that changes the model's own weights.
        NotImplementedError: on every rank, nothing changed: FSDP1; experts that are cut by more than FSDP2;
            expert parallelism; experts that this library does not know; hidden states that go through several lists
            of blocks; blocks that hand more than hidden states to the next one; tensor parallelism along several mesh
            axes; hidden states that are cut between blocks. With the blocks before pruned: a linear layer whose inputs
            are cut otherwise than evenly along their features.
    """
    comm = communicator(group)
    samples = samples_of(comm, model, samples)
    meter = Meter(comm)

    with agreeing(comm) as agreed:
        recipe = Recipe(
            method=method,
            pattern=pattern,
            sparsity=sparsity,
            seed=seed,
            sequential=sequential,
            targets=targets,
            target_share=target_share,
            refit=refit,
            permute=permute,
        )
        plan = make_plan(model, samples, recipe, expert_memory)
        agreed.found = Found(plan.shards, has_blocks=True, num_parameters=count_parameters(model))
        tokens_together(model, batch_tokens)
        walked = {"offload": offload, "batch_tokens": batch_tokens, "finished": finished is not None}
        agreed.facts = {**plan.facts, **{name: repr(value) for name, value in walked.items()}}
        if isinstance(plan.solver, Scored):
            agreed.score = plan.solver.score
    shards = agreed.shards()

    def look_at() -> list[LocalShard]:
        check_room(model, plan, comm.size, offload=offload)
        return without_nans(shards)

    check_parts(comm, agreed.roster, look_at)
    solver = replace(plan.solver, score=agreed.score) if isinstance(plan.solver, Scored) else plan.solver
    return run_blocks(
        meter,
        find_sample_group(comm, plan.axis),
        model,
        plan.samples,
        plan.options,
        plan.linears,
        shards,
        partial(prune_rows, solver=solver, pattern=plan.pattern),
        offload=offload,
        batch_tokens=batch_tokens,
        finished=finished,
        on_block=on_block,
        num_parameters=agreed.num_parameters,
        method=plan.facts["method"],
        pattern=plan.facts["pattern"],
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
