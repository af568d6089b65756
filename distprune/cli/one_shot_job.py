"""The one-shot job: load, prune block by block with calibration text, write each block as it is done."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distprune.calibration import BlockReport, OneShotMethod, load_samples, prune_blocks
from distprune.checkpoint import (
    HfDirectory,
    ModelWriter,
    Unfinished,
    check_output,
    load_model,
    load_tokenizer,
    open_unfinished,
    resolve_model,
)
from distprune.cli.display import Display
from distprune.cli.launchers import Ranks
from distprune.cli.picture import can_draw, write_picture
from distprune.cli.steps import (
    REPORT_NAME,
    evaluate,
    flags,
    open_source,
    report_head,
    write_report,
)
from distprune.collectives import Communicator, together
from distprune.models import decoder_blocks
from distprune.selection import Pattern

__all__ = ["OneShotJob", "run_one_shot_job"]


@dataclass(frozen=True)
class OneShotJob:
    """What the user asked for; all ranks must have been asked for the same."""

    model: str
    output: str
    method: OneShotMethod
    pattern: Pattern
    calibration: str
    samples: int = 128
    sequence_length: int = 2048
    seed: int = 0
    offload: bool = False
    resume: bool = False
    dtype: torch.dtype | None = None
    overwrite: bool = False
    evaluate_on: str | None = None
    evaluation_tokens: int = 8192
    evaluation_length: int = 512


def run_one_shot_job(job: OneShotJob, ranks: Ranks, display: Display) -> dict[str, Any]:
    """Run the job on all ranks and return its report.

    A finished block is on the disk, beside the output; a job that was killed goes on with ``resume`` at
    the first block that is not, and ends with the same bytes. Where nothing was recorded yet, ``resume``
    begins at the beginning, and says so: the same command serves for every start. The number of ranks is
    part of what must be the same, since the sums of activations are.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank, the user's own
            mistakes: see the functions this calls.
        FileExistsError: on every rank: ``resume``, and the job has finished.
    """
    comm = ranks.comm
    with together(comm, **flags(job), resume=job.resume, device=ranks.device.type):
        _check_output(job)
    draws = can_draw(display.say)
    path = resolve_model(job.model, group=comm, log=display.say)
    directory, tokens = open_source(path, ranks, job.evaluate_on, job.evaluation_tokens, job.evaluation_length)
    with together(comm):
        tokenizer = load_tokenizer(path)
    seconds = dict.fromkeys(("load", "evaluate", "prune", "save", "total"), 0.0)
    with _clock(seconds, "total"):
        with _clock(seconds, "load"), display.progress("loading", "bytes") as progress:
            model = load_model(
                directory, mesh=ranks.mesh, dtype=job.dtype, device=ranks.device, group=comm, progress=progress
            )
        samples = load_samples(
            tokenizer, job.calibration, model, num_samples=job.samples, sequence_length=job.sequence_length, group=comm
        )
        unfinished = _open(job, comm, directory, samples)
        writer = ModelWriter(model, directory, unfinished.folder, group=comm)
        if not unfinished.journal:
            if job.resume:
                display.say("nothing was recorded yet: starting at the first block")
            try:
                with _clock(seconds, "evaluate"):
                    before = evaluate(model, tokens, job.evaluation_length, ranks, display, "evaluating before")
                writer.allocate()
                with together(comm):
                    unfinished.record(0, perplexity_before=before, blocks=[])
            except Exception:
                unfinished.discard()
                raise
        first = unfinished.num_done
        with _clock(seconds, "prune"):
            pruning = _prune(job, model, samples, writer, unfinished, display)
        with _clock(seconds, "evaluate"):
            after = evaluate(model, tokens, job.evaluation_length, ranks, display, "evaluating after")
        with _clock(seconds, "save"), display.progress("saving", "bytes") as progress, together(comm):
            blocks = [name for name, _ in decoder_blocks(model)]
            writer.write(updated=_updated(job, blocks), progress=progress)
    head = report_head(job, directory, ranks, (unfinished.journal["perplexity_before"], after))
    report = {**head, "stage_seconds": seconds, "pruning": {**pruning, "resumed_at": first}}
    with together(comm):
        if comm.rank == 0:
            write_report(report, unfinished.folder)
            if draws:
                title = f"{directory.path.name}: {job.method}, {job.pattern!r}"
                write_picture(pruning["blocks"], title, unfinished.folder, display.say)
    unfinished.finish(overwrite=job.overwrite)
    display.one_shot_summary(report)
    return report


def _check_output(job: OneShotJob) -> None:
    if job.resume and not job.overwrite and (Path(job.output) / REPORT_NAME).is_file():
        raise FileExistsError(f"nothing is left to resume: {job.output} is finished, it holds a {REPORT_NAME}")
    check_output(job.output, overwrite=job.overwrite)


def _open(job: OneShotJob, comm: Communicator, directory: HfDirectory, samples: torch.Tensor) -> Unfinished:
    """Open the unfinished folder of a job over these files and these samples."""
    with together(comm):
        sampled = directory.sample() if comm.rank == 0 else ""
    facts = {
        **flags(job),
        "model files": directory.fingerprint(),
        "model weights": comm.broadcast(sampled),
        "calibration tokens": hashlib.sha256(samples.numpy().tobytes()).hexdigest(),
        "ranks": comm.size,
    }
    return open_unfinished(comm, job.output, facts, resume=job.resume, overwrite=job.overwrite, source=directory.path)


def _prune(
    job: OneShotJob,
    model: nn.Module,
    samples: torch.Tensor,
    writer: ModelWriter,
    unfinished: Unfinished,
    display: Display,
) -> dict[str, Any]:
    """Prune and write the blocks that are not on the disk yet; return the report on all of them.

    Beside the stages of ``prune_blocks`` a block's seconds have ``write``, the journal's included.
    """
    comm, first = unfinished.comm, unfinished.num_done
    names = [name for name, _ in decoder_blocks(model)]
    if first:
        display.say(f"going on at block {first} of {len(names)}")
        with together(comm):
            writer.read(names[:first])
    done: list[dict[str, Any]] = list(unfinished.journal["blocks"])

    with display.block_progress(first, len(names)) as progress:

        def on_block(index: int, block: BlockReport) -> None:
            entry = block.to_dict()
            entry["seconds"]["write"] = 0.0
            with _clock(entry["seconds"], "write"):
                # That every rank got here says that every rank has written the block before.
                unfinished.record(index, blocks=done)
                try:
                    writer.write([block.name], updated=_updated(job, [block.name]))
                except OSError as error:
                    kept = f"{index} of {len(names)} blocks are kept, --resume goes on with them"
                    raise OSError(error.errno, f"cannot write {block.name!r}: {error.strerror}; {kept}") from error
            done.append(entry)
            progress(entry)

        report = prune_blocks(
            model,
            samples,
            method=job.method,
            pattern=job.pattern,
            group=comm,
            seed=job.seed,
            offload=job.offload,
            first_block=first,
            on_block=on_block,
        )
    with together(comm):
        unfinished.record(len(names), blocks=done)
    return {**report.to_dict(), "blocks": done}


def _updated(job: OneShotJob, blocks: list[str]) -> list[str]:
    """Return the blocks whose weights the method changes where it does not prune them."""
    return blocks if job.method == "sparsegpt" else []


@contextmanager
def _clock(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - started
