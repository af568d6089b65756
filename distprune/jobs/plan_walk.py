"""What a one-shot job would take, instead of running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from typing_extensions import override

from distprune.calibration.data import load_samples
from distprune.calibration.own_words import SELF
from distprune.checkpoint.hf_directory import open_together
from distprune.checkpoint.hf_load import build_on_meta, load_tokenizer
from distprune.checkpoint.hub import resolve_model
from distprune.collectives.agree import agree, together
from distprune.collectives.communicator import communicator
from distprune.formatting import one_line
from distprune.jobs.one_shot import OneShotJob
from distprune.jobs.options import PLAN, ask, asked as asked_of
from distprune.jobs.own_words import file_of, read_words
from distprune.jobs.run import Device
from distprune.jobs.watcher import Reporter, Watcher
from distprune.oneshot.estimate import as_line


@asked_of
class PlanJob(OneShotJob):
    """Say what :class:`OneShotJob` would take, from the model's config. Nothing runs, and nothing is written.

    Args:
        plan: Print how much memory each rank would take, and run nothing.
        ranks: Plan for so many ranks instead of those that are started.
    """

    plan: bool = ask(default=True, needs=("calibration", "method"), panel=PLAN)
    ranks: int | None = ask(default=None, least=1, most=1 << 20, panel=PLAN)


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


def run_plan_job(
    job: PlanJob, *, group: dist.ProcessGroup | None = None, device: Device = "cpu", watcher: Watcher | None = None
) -> PlannedWalk:
    """Return what the job would take of each rank.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same job.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job, the
            model or, where all of it is asked for, the text; the message says which.
    """
    comm = communicator(group)
    with together(comm):
        job.check_asked()
        device = torch.device(device)
    agree(comm, {**job.flags(), "device": device.type})
    path = resolve_model(job.model, group=comm, log=Reporter(watcher or Watcher(), comm).say)
    directory = open_together(comm, path)
    with together(comm):
        model, _ = build_on_meta(directory, job.dtype)
    num_text = job.samples or 0
    if job.samples is None and job.calibration != SELF:
        with together(comm):
            tokenizer = load_tokenizer(path)
        length, seed = job.sequence_length, job.seed
        samples = load_samples(
            tokenizer, job.calibration, model, num_samples=None, sequence_length=length, seed=seed, group=comm
        )
        num_text = len(samples)
    with together(comm):
        words_file = file_of(job.own_words)
        num_in_file = None if words_file is None else len(read_words(Path(words_file))[0])
        num_windows, num_ranks = job.counts(num_text, num_in_file).total, job.ranks or comm.size
        return PlannedWalk(path, num_ranks, num_windows, job.memory(model, num_windows, num_ranks))
