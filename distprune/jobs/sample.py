"""The job that has a model write windows into a file, to calibrate with as often as one likes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from distprune.calibration.own_words import TOP_K, own_words
from distprune.checkpoint.hf_directory import open_together
from distprune.checkpoint.hf_load import load_model, load_tokenizer, mesh_of
from distprune.checkpoint.hub import name_of_model, resolve_model
from distprune.checkpoint.outputs import check_file, writing
from distprune.collectives.agree import agree, together
from distprune.collectives.communicator import communicator
from distprune.jobs.options import DTYPES, FILES, MOST, WINDOWS, BareJob, ask, asked
from distprune.jobs.own_words import about_tokenizer, words_content
from distprune.jobs.run import Device
from distprune.jobs.watcher import Reporter, Watcher
from distprune.oneshot.report import peak_memory
from distprune.shards.device import as_device


@asked
class SampleJob(BareJob):
    """Have the model write windows of tokens into a file, as :func:`distprune.own_words` does.

    Args:
        output: File to write (safetensors), in no model's directory. It must not exist.
        samples: Windows to write.
        sequence_length: Tokens in each.
        temperature: Divides the logits.
        top_k: Draw from as many of the likeliest tokens.
        dtype: Of the weights in memory. auto: as they are stored.
        overwrite: Replace the file.
    """

    output: str = ask(is_file=True, panel=FILES)
    samples: int = ask(default=128, least=1, most=MOST, panel=WINDOWS)
    sequence_length: int = ask(default=2048, least=2, most=MOST, panel=WINDOWS)
    temperature: float = ask(default=1.0, above=0, panel=WINDOWS)
    top_k: int = ask(default=TOP_K, least=1, most=MOST, panel=WINDOWS)
    dtype: torch.dtype | None = ask(default=None, choices=DTYPES, panel=FILES)
    overwrite: bool = ask(default=False, panel=FILES)

    def check(self) -> None:
        """Raise what can be known to be wrong before anything is read. Local."""
        self.check_asked()
        num_bytes = self.samples * self.sequence_length * torch.int32.itemsize
        check_file(self.output, overwrite=self.overwrite, inputs=[self.model], num_bytes=num_bytes)


@dataclass(frozen=True)
class Sampled:
    """What ``model`` has written into ``path``: windows, of so many tokens each; ``seconds``: writing alone."""

    model: str
    path: Path
    num_samples: int
    sequence_length: int
    seconds: float
    peak_memory: Sequence[int] = ()  # of each rank's process, in bytes


def run_sample_job(
    job: SampleJob, *, group: dist.ProcessGroup | None = None, device: Device = "cpu", watcher: Watcher | None = None
) -> Sampled:
    """Run the job and return what was written. The file is written whole, or not at all.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same job; several
    ranks hold the model sharded by FSDP2, and write different windows. The first one writes the file.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job or the
            model; the message says which.
    """
    comm = communicator(group)
    reporter = Reporter(watcher or Watcher(), comm)
    with together(comm):
        job.check()
        device = as_device(device)
    agree(comm, {**job.flags(), "device": device.type})
    path = resolve_model(job.model, group=comm, log=reporter.say)
    with writing(job.output, comm, overwrite=job.overwrite, inputs=[path], is_file=True) as staging:
        directory = open_together(comm, path)
        with together(comm):
            tokenizer = load_tokenizer(path)
            mesh = mesh_of(group, comm.size, device)
        with reporter.stage("loading", "bytes") as progress:
            model = load_model(directory, mesh=mesh, dtype=job.dtype, device=device, group=comm, progress=progress)
        started = time.perf_counter()
        with reporter.stage("writing own words", "tokens") as progress:
            drawn = {"seed": job.seed, "temperature": job.temperature, "top_k": job.top_k}
            words = own_words(
                model,
                job.samples,
                job.sequence_length,
                **drawn,  # type: ignore[arg-type]
                tokenizer=tokenizer,
                group=comm,
                progress=progress,
            )
        seconds = time.perf_counter() - started
        with together(comm):
            if comm.rank == 0:
                about = {"model": name_of_model(path), **about_tokenizer(tokenizer), **drawn}
                staging.write_bytes(words_content(words, about))
    return Sampled(job.model, Path(job.output), len(words), job.sequence_length, seconds, peak_memory(comm))
