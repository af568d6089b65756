"""What the jobs share: the steps from a model directory to its report, and what is written beside the weights."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from distprune.calibration.data import token_digest
from distprune.checkpoint.disk import write_whole
from distprune.checkpoint.hf_directory import HfDirectory, file_digest, open_together, sample_together
from distprune.checkpoint.hf_load import load_model, load_tokenizer, mesh_of
from distprune.checkpoint.hf_save import save_model
from distprune.checkpoint.hub import resolve_model
from distprune.checkpoint.output_lock import locking
from distprune.checkpoint.replaceable import check_output
from distprune.collectives.agree import agree, together
from distprune.collectives.communicator import communicator
from distprune.evaluation import perplexities, tokenize_file
from distprune.jobs.model_card import CARD_NAME, model_card
from distprune.jobs.options import REPORT_NAME, Job
from distprune.jobs.picture import PICTURE_NAME, can_draw, picture
from distprune.jobs.report import Evaluation, JobReport, PrunedBlocks, Trained, Work
from distprune.jobs.tasks import load_tasks, run_tasks
from distprune.jobs.watcher import Reporter, Watcher
from distprune.oneshot.report import clock, peak_memory
from distprune.shards.device import as_device
from distprune.version import __version__

Device: TypeAlias = torch.device | str

_W = TypeVar("_W", bound=Work)


class Run:
    """A job under way on this rank. Every rank must make one, and call its methods in the same order.

    Making it agrees on the job, finds the model, tokenizes the texts to evaluate on and loads the tasks.
    """

    def __init__(self, job: Job, group: dist.ProcessGroup | None, device: Device, watcher: Watcher | None) -> None:
        self.job, self.comm = job, communicator(group)
        self.reporter = Reporter(watcher or Watcher(), self.comm)
        self.seconds: dict[str, float] = {}
        with together(self.comm):
            job.check()
            self.device = as_device(device)
        agree(self.comm, {**job.flags(), "device": self.device.type})
        path = resolve_model(job.model, group=self.comm, log=self.reporter.say)
        seen: dict[str, str] = {}
        self.read: dict[str, object] = {}  # what a job that goes on must read again
        self._tokens: dict[str, torch.Tensor] = {}
        self.directory = open_together(self.comm, path)
        with together(self.comm):
            self.read["model files"] = self.directory.fingerprint()
            if job.evaluate_on or job.tasks:
                self._tokenizer = load_tokenizer(path)
            for name in job.evaluate_on:
                length, most = job.evaluation_length, job.evaluation_tokens
                ids = tokenize_file(self._tokenizer, name, max_tokens=most, sequence_length=length)
                self._tokens[name] = ids
                seen[f"evaluation tokens of {name}"] = token_digest(ids)
            self._tasks = load_tasks(job.tasks) if job.tasks else None
            self.inputs: list[str | Path] = [*job.inputs(), path]
            self.output = check_output(job.output, overwrite=job.overwrite, inputs=self.inputs)
            self._mesh = mesh_of(group, self.comm.size, self.device)
            told = json.dumps([seen, job.tasks])
            self.evaluation = f"before-{hashlib.sha256(told.encode()).hexdigest()[:12]}"  # names what is evaluated on
        agree(self.comm, {**self.read, **seen})
        self.note_sample("model", self.directory)
        self._started = time.perf_counter()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the output. Every rank must enter it: two rounds of 64 bytes.

        Raises:
            OSError, ValueError: on every rank: another job holds it, or has filled the output since the first look.
        """
        with locking(self.comm, self.output):
            with together(self.comm):
                if self.comm.rank == 0:
                    self.job.check()
            yield

    def note_sample(self, what: str, directory: HfDirectory) -> None:
        """Note bytes from all over the weight files of a ``directory``. Every rank: as :func:`sample_together`."""
        self.read[f"{what} weights"] = sample_together(self.comm, directory)

    def note_weights(self, what: str, directory: HfDirectory) -> None:
        """Note all bytes of the weight files of a ``directory``, which a job that goes on must find again.

        Every rank must call it, and reads its share: a round of 24 bytes a file.

        Raises:
            OSError: on every rank: one cannot be read.
        """
        digests = [file_digest(self.comm, file.path) for file in directory.weight_files]
        self.read[f"{what} weights as read"] = " ".join(digests)

    def load(self, directory: HfDirectory | None = None, **dtypes: torch.dtype | None) -> nn.Module:
        """Return the model: whole on one rank, sharded by FSDP2 over several.

        Or that of another ``directory``, in other ``dtypes``, which are those of :func:`load_model`.
        """
        with clock(self.seconds, "load"), self.reporter.stage("loading", "bytes") as progress:
            return load_model(
                directory or self.directory,
                mesh=self._mesh,
                **{"dtype": self.job.dtype, **dtypes},
                device=self.device,
                group=self.comm,
                progress=progress,
            )

    def save(self, model: nn.Module, folder: Path, *, layers: Sequence[int] | None = None) -> None:
        """Write ``model`` into ``folder``, as :func:`save_model` does. Every rank must call it."""
        with clock(self.seconds, "save"), self.reporter.stage("saving", "bytes") as progress:
            save_model(model, self.directory, folder, layers=layers, group=self.comm, progress=progress)

    def evaluate(self, model: nn.Module, when: str) -> dict[str, Any]:
        """Return the perplexity on each text to evaluate on, and the metrics of each task, as a record has them."""
        of_texts: dict[str, float] = {}
        of_tasks: dict[str, dict[str, float]] = {}
        texts, length = [*self._tokens.values()], self.job.evaluation_length
        if texts:
            where = Path(next(iter(self._tokens))).name if len(texts) == 1 else f"{len(texts)} texts"
            stage = f"evaluating {when} on {where}"
            with clock(self.seconds, "evaluate"), self.reporter.stage(stage, "windows") as progress:
                found = perplexities(model, texts, sequence_length=length, group=self.comm, progress=progress)
            of_texts = dict(zip(self._tokens, found, strict=True))
        if self._tasks is not None:
            with clock(self.seconds, "tasks"), self.reporter.stage(f"tasks {when}", "requests") as progress:
                of_tasks = run_tasks(self._tasks, model, self._tokenizer, self.comm, progress)
        return {"perplexity": of_texts, "tasks": of_tasks}

    def report(self, folder: Path, before: dict[str, Any], after: dict[str, Any], work: _W) -> JobReport[_W]:
        """Return the report of a job that has done its ``work``; ``before``, ``after``: of :meth:`evaluate`.

        The first rank writes it, its model card and its picture into ``folder``. Every rank must call it: one round of
        64 bytes, and one of 8 bytes a rank, with CUDA two.

        Raises:
            OSError: on every rank: the disk is full or not writable.
            RuntimeError: on every rank: the watcher of one has failed.
        """
        self.seconds["total"] = time.perf_counter() - self._started
        on_device = partial(torch.cuda.max_memory_allocated, self.device)
        memory, has_device = peak_memory(self.comm), self.device.type == "cuda"
        device_memory = peak_memory(self.comm, on_device) if has_device else ()
        with together(self.comm):
            versions = {"distprune": str(__version__), "torch": torch.__version__}
            versions["python"] = platform.python_version()
            report = JobReport(
                job=self.job,
                model=self.directory.path,
                versions=versions,
                num_ranks=self.comm.size,
                device=self.device.type,
                before=Evaluation(**before),
                after=Evaluation(**after),
                seconds=self.seconds,
                work=work,
                peak_memory=memory,
                peak_device_memory=device_memory,
            )
            if self.comm.rank == 0:
                write_report(report.to_dict(), folder)
                self._write(folder / CARD_NAME, lambda: model_card(report), "left as it was")
                if isinstance(work, PrunedBlocks | Trained) and can_draw(self.reporter.say):
                    self._write(folder / PICTURE_NAME, lambda: picture(report), "left out, drawing it failed")
            self.reporter.check_here()
        return report

    def _write(self, path: Path, make: Callable[[], bytes], otherwise: str) -> None:
        """Write what ``make`` returns. If ``make`` fails, say so: that must not cost a model that took hours. Local."""
        try:
            content = make()
        except Exception as error:
            self.reporter.say(f"{path.name} is {otherwise}: {type(error).__name__}: {error}")
            return
        write_whole(path, content, sync=False)


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write ``report.json``. Local; for one rank."""
    # JSON has no numbers for infinities and NaN: they are text.
    strict = json.loads(json.dumps(report), parse_constant=lambda constant: str(float(constant)))
    text = json.dumps(strict, indent=2, allow_nan=False) + "\n"
    write_whole(folder / REPORT_NAME, text.encode(), sync=False)
