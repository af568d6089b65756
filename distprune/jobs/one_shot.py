"""The one-shot job: load, prune block by block with windows of tokens, write each block as it is done."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from distprune.calibration.statistics import EXPERT_MEMORY
from distprune.collectives.agree import together
from distprune.jobs.block_files import BlockFiles
from distprune.jobs.calibrated import CalibratedJob, load_calibrated
from distprune.jobs.files import open_files
from distprune.jobs.options import METHOD, RUNNING, PruningJob, ask, asked, parse_amount
from distprune.jobs.report import JobReport, PrunedBlocks
from distprune.jobs.run import Device, Run
from distprune.jobs.watcher import Watcher
from distprune.models.find_shards import count_parameters
from distprune.oneshot.allocation import Allocation, allocate
from distprune.oneshot.estimate import as_line, estimate
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.recipe import BlockRefit, OneShotMethod, Permute, Recipe, Sequential
from distprune.oneshot.report import clock
from distprune.patterns.as_pattern import as_pattern


def parse_bytes(text: str) -> int:
    """Return how many bytes are meant, such as 80G: K, M, G and T are powers of 1,024."""
    return parse_amount(text, "KMGT", 1024)


@asked
class OneShotJob(PruningJob, CalibratedJob):
    """Prune with calibration windows, as ``prune_blocks`` does.

    Args:
        method: How weights are chosen.
        sequential: Prune the layers of a block at once, or layer by layer in the order they run (admm's default).
        allocation: uniform: all layers end with --sparsity. gradients: more zeros where the loss feels them less
            (admm's default).
        refit: Fit each pruned block as a whole to the dense model's (the default with dense targets), or none.
        permute: channels: for N:M, put them in the order in which most is kept (the default with dense targets); or
            none.
        expert_memory: Of a mixture: memory for the sums of experts that a rank prunes at a time.
    """

    method: OneShotMethod = ask(default="admm", panel=METHOD)
    sequential: Sequential | None = ask(default=None, panel=METHOD)
    allocation: Allocation | None = ask(default=None, panel=METHOD)
    refit: BlockRefit | None = ask(default=None, panel=METHOD)
    permute: Permute | None = ask(default=None, panel=METHOD)
    expert_memory: int = ask(
        default=EXPERT_MEMORY, least=1, parse=parse_bytes, metavar="N[K|M|G|T]", decides=False, panel=RUNNING
    )

    @override
    def check_asked(self) -> None:
        super().check_asked()
        self.recipe()
        self.allocation_or_default()

    @override
    def own_words_or_default(self) -> int | str | None:
        # The others are by default as their papers have them.
        return 0 if self.own_words is None and self.method != "admm" else self.own_words

    def recipe(self) -> Recipe:
        """Return what decides the result of the walk, resolved. Local; raises as :meth:`Recipe.resolved` does."""
        own = {option.name: getattr(self, option.name) for option in fields(Recipe)}
        return Recipe(**own).resolved()

    def memory(self, model: nn.Module, num_windows: int, num_ranks: int) -> dict[str, int]:
        """Return the bytes that pruning ``model`` takes of each rank, see ``oneshot.estimate``. Local."""
        windows = num_windows, self.sequence_length
        return estimate(model, self.recipe(), *windows, num_ranks, self.batch_tokens, self.expert_memory)

    def allocation_or_default(self) -> Allocation:
        """Return how zeros are shared out among linear maps. Local.

        Raises:
            ValueError: shares by gradients were asked for, and the pattern has no one share for all maps.
        """
        pattern = as_pattern(self.pattern, self.sparsity)
        share = vars(pattern).get("sparsity")
        if self.allocation == "gradients" and not isinstance(share, float):
            raise ValueError(
                "allocation='gradients' needs a pattern with one share, such as 'unstructured' with a sparsity of 0.6; "
                f"{pattern!r} leaves nothing to share out"
            )
        if self.allocation is not None:
            return self.allocation
        # Wanda and SparseGPT are by default as the papers have them.
        is_shared_out = isinstance(share, float) and self.method == "admm" and pattern.by_row().is_by_row
        return "gradients" if is_shared_out else "uniform"


def run_one_shot_job(
    job: OneShotJob, *, group: dist.ProcessGroup | None = None, device: Device = "cpu", watcher: Watcher | None = None
) -> JobReport[PrunedBlocks]:
    """Run the job and return its report.

    A finished block is a file of the output, which is made beside its place. A killed job continues with ``resume``
    after its last intact block: on as many ranks it ends with the same bytes, on another number with the same weights
    but for rounding. If nothing was recorded, ``resume`` starts at the beginning and says so: the same call serves for
    every start. The dense model's outputs of finished blocks are computed again, one forward a block; they are not
    stored. Before the walk it says how much memory that takes, see ``oneshot.estimate``.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same
    job; several ranks hold the model sharded by FSDP2. Communicates what the functions it calls do.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job,
            the model or the text; the message says which.
        FileExistsError: on every rank: an unfinished job is there without ``resume``, or with it a finished one.
    """
    run = Run(job, group, device, watcher)
    with run.locked():
        calibrated = load_calibrated(run, job)
        model, counts = calibrated.model, calibrated.windows.counts
        with together(run.comm):
            run.reporter.say(as_line(job.memory(model, counts.total, run.comm.size)))
        with open_files(run, job) as files:
            samples = calibrated.samples(run, job, files)
            blocks = BlockFiles(run, files, model, files.result)
            before = files.recall(run.evaluation, lambda: run.evaluate(model, "before"))
            shares = files.recall("shares", lambda: _shares(job, run, model, samples))
            pattern = as_pattern(job.pattern, job.sparsity)
            pattern = pattern.within("tensor") if pattern.has_scope else pattern  # each linear map by itself
            run.reporter.begin("pruning block by block")
            with clock(run.seconds, "prune"):
                report = prune_blocks(
                    model,
                    samples,
                    method=job.method,
                    pattern=pattern if shares is None else replace(pattern, sparsity=shares),  # type: ignore[type-var]
                    group=run.comm,
                    seed=job.seed,
                    sequential=job.sequential,
                    targets=job.targets,
                    target_share=job.target_share,
                    refit=job.refit,
                    permute=job.permute,
                    offload=job.offload,
                    batch_tokens=job.batch_tokens,
                    expert_memory=job.expert_memory,
                    finished=blocks.finished,
                    on_block=blocks.on_block,
                )
            by: Allocation = "uniform" if shares is None else "gradients"
            ended = (blocks.reports(), blocks.resumed_at, vars(counts))
            pruned = PrunedBlocks(report, repr(pattern), *ended, by, count_parameters(model))
            after = run.evaluate(model, "after")
            with clock(run.seconds, "save"), run.reporter.stage("saving", "bytes") as progress:
                blocks.finish(progress)
            return run.report(files.result, before, after, pruned)


def _shares(job: OneShotJob, run: Run, model: nn.Module, samples: torch.Tensor) -> dict[str, float] | None:
    """Return the share of zeros of each linear map of the dense ``model``; ``None``: all have the same."""
    if job.allocation_or_default() == "uniform":
        return None
    sparsity = vars(as_pattern(job.pattern, job.sparsity))["sparsity"]
    try:
        with clock(run.seconds, "allocate"), run.reporter.stage("allocating", "batches") as progress:
            return allocate(model, samples, sparsity, group=run.comm, batch_tokens=job.batch_tokens, progress=progress)
    except NotImplementedError as error:  # on every rank
        if job.allocation is not None:
            raise
        run.reporter.say(f"all layers have the same sparsity: {error}")
        return None
