"""The job of ``distprune prune``: resolve, load, evaluate, prune, evaluate, write, report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from distprune.checkpoint import check_output, load_model, resolve_model, save_model, writing
from distprune.cli.display import Display
from distprune.cli.launchers import Ranks
from distprune.cli.steps import evaluate, flags, open_source, report_head, write_report
from distprune.collectives import together
from distprune.methods import Method, Scope, check_amount, prune_model
from distprune.selection import Pattern

__all__ = ["PruneJob", "run_job"]


@dataclass(frozen=True)
class PruneJob:
    """What the user asked for; all ranks must have been asked for the same."""

    model: str
    output: str
    method: Method
    scope: Scope | None
    amount: int | float | None
    seed: int
    pattern: Pattern | None = None  # in place of the amount
    again: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    overwrite: bool = False
    evaluate_on: str | None = None
    evaluation_tokens: int = 8192
    evaluation_length: int = 512


def run_job(job: PruneJob, ranks: Ranks, display: Display) -> dict[str, Any]:
    """Run the job on all ranks and return its report. Nothing is written unless everything succeeds.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank, the user's own
            mistakes: see the functions this calls.
    """
    comm = ranks.comm
    with together(comm, **flags(job), device=ranks.device.type):
        if job.amount is not None:
            check_amount(job.amount)
        check_output(job.output, overwrite=job.overwrite)
    path = resolve_model(job.model, group=comm, log=display.say)
    directory, tokens = open_source(path, ranks, job.evaluate_on, job.evaluation_tokens, job.evaluation_length)

    started = time.perf_counter()
    seconds: dict[str, float] = {}
    with writing(job.output, overwrite=job.overwrite, inputs=[path], group=comm) as staging:
        with display.progress("loading", "bytes") as progress:
            model = load_model(
                directory, mesh=ranks.mesh, dtype=job.dtype, device=ranks.device, group=comm, progress=progress
            )
        seconds["load"] = time.perf_counter() - started
        before = evaluate(model, tokens, job.evaluation_length, ranks, display, "evaluating before")
        report = prune_model(
            model,
            method=job.method,
            amount=job.amount,
            pattern=job.pattern,
            scope=job.scope,
            seed=job.seed,
            again=job.again,
            include=job.include,
            exclude=job.exclude,
            group=comm,
        )
        seconds["prune"] = report.seconds
        after = evaluate(model, tokens, job.evaluation_length, ranks, display, "evaluating after")
        started_saving = time.perf_counter()
        with display.progress("saving", "bytes") as progress:
            save_model(model, directory, staging, group=comm, progress=progress)
        seconds["save"] = time.perf_counter() - started_saving
        seconds["total"] = time.perf_counter() - started
        head = report_head(job, directory, ranks, (before, after))
        written = {**head, "stage_seconds": seconds, "pruning": report.to_dict()}
        with together(comm):
            if comm.rank == 0:
                write_report(written, staging)
    display.summary(written)
    return written
