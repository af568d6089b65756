"""A small job of each kind, run on ranks that may be killed, and what it writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distprune.jobs import (
    FinetuneJob,
    OneShotJob,
    PruneJob,
    SampleJob,
    ShrinkJob,
    StreamedJob,
    Watcher,
    run_finetune_job,
    run_one_shot_job,
    run_prune_job,
    run_sample_job,
    run_shrink_job,
    run_streamed_job,
)
from distprune.jobs.run import JobFiles
from tests.small_job import small_finetune_job, small_job, small_shrink_job

__all__ = ["KINDS", "RESUMABLE", "Killed", "files", "job_of", "left", "run", "run_in_own_folder", "run_on_rank"]

RUN: dict[type, Callable[..., Any]] = {
    PruneJob: run_prune_job,
    OneShotJob: run_one_shot_job,
    ShrinkJob: run_shrink_job,
    FinetuneJob: run_finetune_job,
    StreamedJob: run_streamed_job,
    SampleJob: run_sample_job,
}
RESUMABLE = ("one-shot", "shrink", "finetune", "streamed")
KINDS = ("prune", *RESUMABLE)


class Killed(SystemExit):
    """What a signal does, as far as the code under it can tell: no handler for exceptions sees it."""


def job_of(kind: str, model: Path, text: Path, folder: Path) -> Any:
    """Return a job of a kind, whose output is ``folder`` / outputs / out."""
    job: Any
    if kind == "one-shot":
        job = small_job(model, text, folder)
        more: dict[str, Any] = {"method": "wanda", "allocation": "gradients"}  # by the dense model
        job = dataclasses.replace(job, **more, calibration="self", own_words=None)
    elif kind == "shrink":
        job = small_shrink_job(model, text, folder, mlp=0.75)
    elif kind == "finetune":
        job = dataclasses.replace(small_finetune_job(model, text, folder, steps=5), save_every=0.0)
    elif kind == "sample":
        (folder / "outputs").mkdir()
        job = SampleJob(model=str(model), output="", samples=2, sequence_length=8)
    else:
        job = {"prune": PruneJob, "streamed": StreamedJob}[kind](model=str(model), output="", pattern="2:4")
    return dataclasses.replace(job, output=str(folder / "outputs" / "out"))


def run(job: Any, watcher: Watcher | None = None) -> Any:
    return RUN[type(job)](job, watcher=watcher)


def left(job: Any) -> Path:
    """Return where the job keeps what it has done."""
    output = Path(job.output)
    return output.with_name(f".{output.name}.unfinished")


def files(folder: Path) -> dict[str, bytes]:
    """Return every file in it and below, but for reports, which hold times."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "report.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def run_on_rank(_: int, job: Any, dies_at: int | str | None = None, watcher: Watcher | None = None) -> str:
    """Run this rank's job; return the error as text, or nothing.

    It may be killed when item ``dies_at``, a block, a file or a state, is in its place, and not recorded yet; or before
    the record of that name.
    """
    record, num_items = JobFiles.record, 0

    def dying(self: JobFiles, name: str, value: Any) -> None:
        nonlocal num_items
        if name == dies_at:
            raise Killed
        if name.startswith("model") or name == "training":
            if num_items == dies_at:
                raise Killed
            num_items += 1
        record(self, name, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobFiles, "record", dying)
        patch.setattr("distprune.jobs.run.can_draw", lambda _: False)  # which takes longer than all else
        try:
            run(job, watcher)
        except Killed:
            return "killed"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def run_in_own_folder(rank: int, folder: Path, job: Any) -> str:
    """Run this rank's job where its paths lead to files of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / str(rank))
        return run_on_rank(rank, job)
