"""The job that has a model write windows into a file, to calibrate with as often as one likes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from typing_extensions import override

from distprune.calibration.own_words import TOP_K, own_words
from distprune.calibration.text import open_text
from distprune.checkpoint.hub import name_of_model
from distprune.checkpoint.outputs import check_file, writing
from distprune.collectives.agree import together
from distprune.jobs.options import MOST, WINDOWS, BareJob, ask, asked
from distprune.jobs.own_words import about_tokenizer, words_content
from distprune.jobs.run import BareRun, Device
from distprune.jobs.watcher import Watcher
from distprune.oneshot.report import peak_memory


@asked
class SampleJob(BareJob):
    """Have the model write windows of tokens into a file, as :func:`distprune.own_words` does.

    Args:
        output: File to write (safetensors), in no model's directory. It must not exist.
        samples: Windows to write.
        sequence_length: Tokens in each.
        beginnings: File of what documents begin with, one a line, in the place of what comes with distprune.
        temperature: Divides the logits.
        top_k: Draw from as many of the likeliest tokens.
        dtype: Of the weights in memory. auto: as they are stored.
        overwrite: Replace the file.
    """

    samples: int = ask(default=128, least=1, most=MOST, panel=WINDOWS)
    sequence_length: int = ask(default=2048, least=2, most=MOST, panel=WINDOWS)
    beginnings: str | None = ask(default=None, is_file=True, metavar="FILE", panel=WINDOWS)
    temperature: float = ask(default=1.0, above=0, panel=WINDOWS)
    top_k: int = ask(default=TOP_K, least=1, most=MOST, panel=WINDOWS)

    @override
    def check(self, *inputs: Path) -> Path:
        self.check_asked()
        num_bytes = self.samples * self.sequence_length * torch.int32.itemsize
        return check_file(self.output, overwrite=self.overwrite, inputs=[*self.inputs(), *inputs], num_bytes=num_bytes)


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
    run = BareRun(job, group, device, watcher)
    with writing(job.output, run.comm, overwrite=job.overwrite, inputs=run.inputs, is_file=True) as staging:
        with together(run.comm):
            tokenizer, how = run.tokenizer, job.asked_of(own_words)
            if job.beginnings is not None:
                with open_text(Path(job.beginnings), "file of beginnings") as file:
                    how["beginnings"] = [line.strip() for line in file if line.strip()]
                if not how["beginnings"]:
                    raise ValueError(f"{job.beginnings} (--beginnings) holds no line that a text could begin with")
        model = run.load()
        with run.one_dtype(), run.stage("write", "writing own words", "tokens") as progress:
            words = own_words(model, job.samples, **how, tokenizer=tokenizer, group=run.comm, progress=progress)
        with together(run.comm):
            if run.comm.rank == 0:
                about = {"model": name_of_model(run.directory.path), **about_tokenizer(tokenizer), **how}
                about["beginnings"] = len(how["beginnings"] or ())
                staging.write_bytes(words_content(words, about))
    memory = peak_memory(run.comm)
    return Sampled(job.model, Path(job.output), len(words), job.sequence_length, run.seconds["write"], memory)
