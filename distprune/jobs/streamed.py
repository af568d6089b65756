"""The job that prunes a checkpoint without its model: tensors are streamed from files to files, piece by piece."""

from __future__ import annotations

from contextlib import ExitStack

import torch.distributed as dist
from typing_extensions import override

from distprune.checkpoint.hf_directory import CONFIG_NAME, read_json
from distprune.checkpoint.stored_parameters import find_stored, mapped_tensors
from distprune.collectives.agree import together
from distprune.jobs.options import FILES, METHOD, ask, asked
from distprune.jobs.prune import PruneJob
from distprune.jobs.report import JobReport
from distprune.jobs.run import Run, clock
from distprune.jobs.stretches import STRETCH, StretchWriter
from distprune.jobs.unfinished import ResumableJob, open_unfinished
from distprune.jobs.watcher import Watcher
from distprune.pruning.prune_model import Request
from distprune.pruning.report import PruneReport
from distprune.pruning.streamed import StreamedPruning


@asked
class StreamedJob(PruneJob, ResumableJob):
    """:class:`PruneJob` for a checkpoint that may be larger than memory: the same bytes, and no model.

    Nothing is evaluated, and dtypes stay as they are stored.
    """

    streamed: bool = ask(
        "Build no model: stream the weights from file to file, whatever their size.", default=True, panel=METHOD
    )
    # As torch.distributed.checkpoint.FileSystemWriter has it; a killed job can go on with either.
    sync_files: bool = ask(
        "Wait until the output is on the disk; without, as after cp.", default=True, decides=False, panel=FILES
    )

    @override
    def check_asked(self) -> None:
        if self.evaluate_on or self.tasks:
            raise ValueError("--streamed builds no model that --eval or --tasks could run; evaluate the output")
        if self.dtype is not None:
            raise ValueError("--streamed leaves weights in the dtype they are stored in; leave out dtype (--dtype)")
        super().check_asked()


def run_streamed_job(
    job: StreamedJob, *, group: dist.ProcessGroup | None = None, watcher: Watcher | None = None
) -> JobReport[PruneReport]:
    """Run the job and return its report. The output is written whole, or not at all.

    The files are read once where groups (N:M) and rows are decided by themselves; else first to choose, as
    ``StreamedPruning`` says, and then to prune and write. They are mapped, and each thread of a rank, of which it
    has as many as torch (at most 8), has a few pieces of the rank's share in memory.
    Where transformers knows the architecture the output is that of :func:`run_prune_job`, byte for byte; where it does
    not, names decide what is pruned (see ``find_stored``), and ``include`` and ``exclude`` say it better.

    What is written grows beside the output, with a journal of it. A job that was killed goes on with ``resume``: what
    is recorded and on the disk as it was written is not written again; what is pruned is chosen again. If the weight
    files were changed or fetched anew, all is written again.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same job.
    Communicates what the choice does, and a round for each 256 MiB of a rank.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job or
            the model; the message says which.
        FileExistsError: on every rank: an unfinished job is there without ``resume``, or with it a finished one.
    """
    run = Run(job, group, "cpu", watcher)
    comm = run.comm
    with run.locked(), ExitStack() as opened:
        with together(comm):
            tensors = opened.enter_context(mapped_tensors(run.directory.weight_files))
            stored = find_stored(run.directory, job.include, job.exclude)
            values = stored.values(tensors)
            if stored.by_names:
                kind = read_json(run.directory.path / CONFIG_NAME).get("model_type")
                run.reporter.say(f"transformers has no model of type {kind!r} for these tensors: their names decide")
        with open_unfinished(run, job, sync_files=job.sync_files) as unfinished:
            # Not the bytes: to read them all takes as long as to prune them. Nodes may have copies of their own.
            if not unfinished.is_same("weight files", comm.broadcast(run.directory.stamps)):
                run.reporter.say("the weight files were changed or fetched anew: they are pruned from the beginning")
            run.reporter.say("choosing what is pruned")
            with clock(run.seconds, "choose"):
                asked = (job.sparsity, job.method, job.pattern, job.scope, job.seed, None, job.include, job.exclude)
                request = Request(stored.found, *asked)
                pruning = StreamedPruning(comm, request, values)
            with together(comm):
                writer = StretchWriter(run.directory, stored, pruning, tensors, unfinished)
            with clock(run.seconds, "write"):
                writer.allocate()
                first = 0
                if unfinished.items(STRETCH):
                    with run.reporter.stage("checking what is written", "bytes"):
                        first = writer.num_as_written()
                if job.resume:
                    run.reporter.say(f"going on after {first} of {len(writer.stretches)} stretches")
                with run.reporter.stage("pruning", "bytes") as progress:
                    writer.write(first, progress)
            return run.report(unfinished.result, {}, {}, pruning.report(writer.counts()))
