"""The job that prunes in place: load, evaluate, prune, evaluate, write."""

from __future__ import annotations

from typing import Literal

import torch.distributed as dist
from typing_extensions import override

from distprune.jobs.options import METHOD, PruningJob, ask, asked
from distprune.jobs.report import JobReport
from distprune.jobs.run import Device, open_job
from distprune.jobs.watcher import Watcher
from distprune.patterns.as_pattern import as_pattern
from distprune.patterns.base import Scope
from distprune.pruning.prune_model import prune_model
from distprune.pruning.report import PruneReport


@asked
class PruneJob(PruningJob):
    """Prune by the weights alone, as ``prune_model`` does.

    Args:
        method: How weights are chosen. admm, sparsegpt, wanda: block by block, by the inputs of each layer, on text
            that the model writes if there is no --calibration.
        scope: global: all weights compete (the default). tensor: those of each tensor.
        include: Prune the parameters that match, instead of the default ones. Repeatable. By weights alone: not with
            --calibration, admm, sparsegpt or wanda.
        exclude: Leave out the parameters that match. Repeatable. By weights alone, as --include.
    """

    method: Literal["magnitude", "random"] = ask(default="magnitude", panel=METHOD)
    scope: Scope | None = ask(default=None, panel=METHOD)
    include: tuple[str, ...] = ask(default=(), metavar="NAMES", panel=METHOD)
    exclude: tuple[str, ...] = ask(default=(), metavar="NAMES", panel=METHOD)

    @override
    def check_asked(self) -> None:
        super().check_asked()
        as_pattern(self.pattern, self.sparsity, self.scope)


def run_prune_job(
    job: PruneJob, *, group: dist.ProcessGroup | None = None, device: Device = "cpu", watcher: Watcher | None = None
) -> JobReport[PruneReport]:
    """Run the job and return its report. The output is written whole, or not at all.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same
    job; several ranks hold the model sharded by FSDP2. Communicates what the functions it calls do.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job,
            the model or the text; the message says which.
    """
    with open_job(job, group, device, watcher) as run:
        files, model = run.begin(), run.load()
        before = run.evaluate(model, "before")
        with run.stage("prune", "pruning"):
            pruned = prune_model(model, score=job.method, **job.asked_of(prune_model), group=run.comm)
        after = run.evaluate(model, "after")
        run.save(model, files.result)
        return run.report(before, after, pruned)
