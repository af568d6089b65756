"""The one-shot job: load, prune block by block with windows of tokens, write each block; and what it would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from distprune.calibration.statistics import EXPERT_MEMORY
from distprune.checkpoint.hf_load import build_on_meta
from distprune.collectives.agree import together
from distprune.formatting import one_line
from distprune.jobs.block_files import BlockFiles
from distprune.jobs.options import METHOD, MOST, PLAN, RUNNING, PruningJob, ask, asked, parse_amount
from distprune.jobs.own_words import CalibratedJob
from distprune.jobs.report import JobReport, PrunedBlocks
from distprune.jobs.run import Device, Run, open_job
from distprune.jobs.watcher import Watcher
from distprune.models.find_shards import count_parameters
from distprune.oneshot.allocation import Allocation, allocate
from distprune.oneshot.estimate import as_line, estimate
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.recipe import BlockRefit, OneShotMethod, Permute, Recipe, Sequential
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
        epochs: How often all windows are gone through where blocks are fitted (4): more take longer, and are better.
        expert_memory: Of a mixture: memory for the sums of experts that a rank prunes at a time.
    """

    method: OneShotMethod = ask(default="admm", panel=METHOD)
    sequential: Sequential | None = ask(default=None, panel=METHOD)
    allocation: Allocation | None = ask(default=None, panel=METHOD)
    refit: BlockRefit | None = ask(default=None, panel=METHOD)
    permute: Permute | None = ask(default=None, panel=METHOD)
    epochs: int | None = ask(default=None, least=1, most=MOST, panel=METHOD)
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
        return Recipe(**self.asked_of(Recipe)).resolved()

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
        has_share = isinstance(vars(pattern).get("sparsity"), float)
        if self.allocation == "gradients" and not has_share:
            raise ValueError(
                "allocation='gradients' needs a pattern with one share, such as 'unstructured' with a sparsity of 0.6; "
                f"{pattern!r} leaves nothing to share out"
            )
        # Wanda and SparseGPT are by default as the papers have them.
        is_shared_out = has_share and self.method == "admm" and pattern.by_row().is_by_row
        return self.allocation or ("gradients" if is_shared_out else "uniform")


@asked
class PlanJob(OneShotJob):
    """Say what :class:`OneShotJob` would take, from the model's directory. Nothing runs, and nothing is written.

    Args:
        plan: Print how much memory each rank would take, and run nothing.
        ranks: Plan for so many ranks instead of those that are started.
    """

    plan: bool = ask(default=True, needs=("calibration", "method"), panel=PLAN)
    ranks: int | None = ask(default=None, least=1, most=1 << 20, panel=PLAN)

    @override
    def check(self, *inputs: Path) -> Path:
        self.check_asked()
        return Path(self.output)


@dataclass(frozen=True)
class PlannedWalk:
    """The bytes that each of ``num_ranks`` needs for the job, by term; it walks with ``num_windows``."""

    model: Path
    num_ranks: int
    num_windows: int
    terms: Mapping[str, int]

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{self.model.name} on {self.num_ranks} ranks: {as_line(self.terms)}")


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
    with open_job(job, group, device, watcher) as run:
        windows = job.windows(run)
        model = run.load()
        run.note_weights("model", run.directory)
        with together(run.comm):
            run.reporter.say(as_line(job.memory(model, windows.counts.total, run.comm.size)))
        files = run.begin()
        samples = windows.samples(run, model, files)
        blocks = BlockFiles(run, files, model, files.result)
        before = files.recall(run.evaluation, lambda: run.evaluate(model, "before"))
        shares = files.recall("shares", lambda: _shares(job, run, model, samples))
        pattern: Any = job.recipe().pattern  # a Pattern: each linear layer by itself
        shared_out = pattern if shares is None else replace(pattern, sparsity=shares)
        how = {**job.asked_of(prune_blocks), "pattern": shared_out, "sparsity": None}
        with run.stage("prune", "pruning block by block"):
            report = prune_blocks(
                model, samples, **how, group=run.comm, finished=blocks.finished, on_block=blocks.on_block
            )
        by: Allocation = "uniform" if shares is None else "gradients"
        ended = (blocks.reports(), blocks.resumed_at, vars(windows.counts))
        pruned = PrunedBlocks(report, repr(pattern), *ended, by, count_parameters(model))
        after = run.evaluate(model, "after")
        with run.stage("save", "saving", "bytes") as progress:
            blocks.finish(progress)
        return run.report(before, after, pruned)


def _shares(job: OneShotJob, run: Run, model: nn.Module, samples: torch.Tensor) -> dict[str, float] | None:
    """Return the share of zeros of each linear map of the dense ``model``; ``None``: all have the same."""
    if job.allocation_or_default() == "uniform":
        return None
    sparsity = vars(as_pattern(job.pattern, job.sparsity))["sparsity"]
    try:
        with run.stage("allocate", "allocating", "batches") as progress:
            return allocate(model, samples, sparsity, group=run.comm, batch_tokens=job.batch_tokens, progress=progress)
    except NotImplementedError as error:  # on every rank
        if job.allocation is not None:
            raise
        run.reporter.say(f"all layers have the same sparsity: {error}")
        return None


def run_plan_job(
    job: PlanJob, *, group: dist.ProcessGroup | None = None, device: Device = "cpu", watcher: Watcher | None = None
) -> PlannedWalk:
    """Return what the job would take of each rank.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same job.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job, the
            model or the text; the message says which.
    """
    run = Run(replace(job, evaluate_on=(), tasks=()), group, device, watcher)  # nothing is evaluated
    with together(run.comm):
        model, _ = build_on_meta(run.directory, job.dtype)
    num_windows = job.windows(run).counts.total
    with together(run.comm):
        num_ranks = job.ranks or run.comm.size
        return PlannedWalk(run.directory.path, num_ranks, num_windows, job.memory(model, num_windows, num_ranks))
