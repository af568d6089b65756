"""The one-shot job: load, prune block by block with calibration text, write each block as it is done."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from dataclasses import dataclass
from typing import Any

import torch

from distprune.calibration import BlockReport, OneShotMethod, load_samples, prune_blocks
from distprune.checkpoint import ModelWriter, check_output, load_model, open_unfinished, resolve_model
from distprune.cli.display import Display
from distprune.cli.launchers import Ranks
from distprune.cli.steps import evaluate, flags, load_tokenizer, open_source, report_head, write_report
from distprune.collectives import together
from distprune.selection import Pattern
from distprune.shards import decoder_blocks

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

    def facts(self) -> dict[str, Any]:
        """Return the arguments as JSON carries them, but for ``resume``."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "resume"}
        return {**facts, "pattern": repr(self.pattern), "dtype": None if self.dtype is None else str(self.dtype)}


def run_one_shot_job(job: OneShotJob, ranks: Ranks, display: Display) -> dict[str, Any]:
    """Run the job on all ranks and return its report.

    A finished block is on the disk, beside the output; a job that was killed goes on with ``resume`` at
    the first block that is not, and ends with the same bytes. The number of ranks is part of what must
    be the same, since the sums of activations are.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank, the user's own
            mistakes: see the functions this calls.
    """
    comm = ranks.comm
    facts = flags(job.facts())
    with together(comm, **facts, resume=job.resume, device=ranks.device.type):
        check_output(job.output, overwrite=job.overwrite)
    path = resolve_model(job.model, group=comm, log=display.say)
    directory, tokens = open_source(path, ranks, job.evaluate_on, job.evaluation_tokens, job.evaluation_length)
    started = time.perf_counter()
    with display.progress("loading", "bytes") as progress:
        model = load_model(
            directory, mesh=ranks.mesh, dtype=job.dtype, device=ranks.device, group=comm, progress=progress
        )
    with together(comm):
        tokenizer = load_tokenizer(path)
    samples = load_samples(
        tokenizer, job.calibration, model, num_samples=job.samples, sequence_length=job.sequence_length, group=comm
    )
    facts["model files"] = directory.fingerprint()
    facts["calibration tokens"] = hashlib.sha256(samples.numpy().tobytes()).hexdigest()
    facts["ranks"] = comm.size
    unfinished = open_unfinished(
        comm, job.output, facts, resume=job.resume, overwrite=job.overwrite, source=directory.path
    )
    blocks = [name for name, _ in decoder_blocks(model)]
    writer = ModelWriter(model, directory, unfinished.folder, group=comm)
    if not unfinished.journal:
        before = evaluate(model, tokens, job.evaluation_length, ranks, display, "evaluating before")
        writer.allocate()
        unfinished.record(0, perplexity_before=before, blocks=[])
    else:
        display.say(f"going on at block {unfinished.num_done} of {len(blocks)}")
        with together(comm):
            writer.read(blocks[: unfinished.num_done])
    first = unfinished.num_done
    done: list[dict[str, Any]] = list(unfinished.journal["blocks"])

    with display.progress("pruning", "blocks") as progress:

        def on_block(index: int, block: BlockReport) -> None:
            # That every rank got here says that every rank has written the block before.
            unfinished.record(index, blocks=done)
            writer.write([block.name])
            done.append(block.to_dict())
            progress(index + 1, len(blocks))

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
    unfinished.record(len(blocks), blocks=done)
    after = evaluate(model, tokens, job.evaluation_length, ranks, display, "evaluating after")
    head = report_head(job.facts(), directory, ranks, (unfinished.journal["perplexity_before"], after))
    written = {**head, "pruning": {**report.to_dict(), "blocks": done, "resumed_at": first}}
    started_saving = time.perf_counter()
    with display.progress("saving", "bytes") as progress, together(comm):
        writer.write(progress=progress)
    written["stage_seconds"] = {
        "save": time.perf_counter() - started_saving,
        "total": time.perf_counter() - started,
    }
    with together(comm):
        if comm.rank == 0:
            write_report(written, unfinished.folder)
    unfinished.finish(overwrite=job.overwrite)
    display.one_shot_summary(written)
    return written
