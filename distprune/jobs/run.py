"""A job under way: what all jobs share, from the model's directory to the report beside the weights that are written.

A job works in a hidden folder beside its output. ``.NAME.unfinished`` holds the *recipe*, what decides the result, the
*records*, small JSON files of what need not be found out again, and the directory ``model``, which becomes the output
when everything is in it. A file is written beside its place and renamed, so it is whole or not there: a job that was
killed goes on with what is recorded. A folder that has a recipe and no ``model`` has had its day: whoever takes the
lock of the output removes it.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from distprune.calibration.data import check_fit, token_digest
from distprune.calibration.text import tokenize_file
from distprune.checkpoint.disk import partial_of, write_whole
from distprune.checkpoint.hf_directory import (
    HfDirectory,
    file_digest,
    new_digest,
    open_directory,
    open_together,
    read_json,
)
from distprune.checkpoint.hf_load import load_config, load_model, load_tokenizer, mesh_of
from distprune.checkpoint.hf_save import save_model
from distprune.checkpoint.hub import resolve_model
from distprune.checkpoint.output_lock import RECIPE_NAME, RESULT_NAME, locking, remove_tree, unfinished_of
from distprune.checkpoint.outputs import check_shared, publish
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import communicator
from distprune.evaluation import Progress, perplexities
from distprune.jobs.model_card import CARD_NAME, model_card
from distprune.jobs.options import REPORT_NAME, BareJob, Job
from distprune.jobs.picture import PICTURE_NAME, can_draw, kind_of, picture
from distprune.jobs.report import Evaluation, JobReport, PrunedBlocks, SmallerModel, Trained, Work
from distprune.jobs.tasks import load_tasks, run_tasks
from distprune.jobs.watcher import Reporter, Watcher
from distprune.mistakes import is_expected
from distprune.oneshot.report import clock, peak_memory
from distprune.shards.device import as_device
from distprune.version import __version__

Device: TypeAlias = torch.device | str
STATE = "training"  # the record that names a saved state

_VERSIONS = {"distprune": str(__version__), "torch": torch.__version__}  # with others other bits may come
_AT_FAULT = (ValueError, TypeError, NotImplementedError)  # the input is: a job that goes on would get no further
_W = TypeVar("_W", bound=Work)


class JobFiles:
    """The ``folder`` of an unfinished job; its records are the same on every rank, and the first one writes them.

    ``result``: the directory that becomes the output. ``records``: what is recorded, by name. ``sync``: wait for the
    disk.
    """

    def __init__(self, comm: Communicator, folder: Path, records: Mapping[str, Any], *, sync: bool = True) -> None:
        self.comm, self.folder, self.result, self.sync = comm, folder, folder / RESULT_NAME, sync
        self.records, self.was_begun = dict(records), bool(records)

    def known(self, name: str) -> Any:
        """Return what is recorded under ``name``; ``None``: nothing is. Local."""
        return self.records.get(name)

    def record(self, name: str, value: Any) -> None:
        """Record ``value``, which JSON carries, under ``name``. Every rank must call it, with the same. Local."""
        content = json.dumps({"value": value})
        if self.comm.rank == 0:
            write_whole(self.folder / f"{name}.json", content.encode(), sync=self.sync)
        self.records[name] = json.loads(content)["value"]

    def recall(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what is recorded under ``name``, or what ``make`` returns, which is recorded then.

        What comes back is as JSON carries it: tuples are lists. Every rank must call it, and ``make`` return the same
        on all: what ``make`` communicates, and a round of 64 bytes.

        Raises:
            OSError: on every rank: the disk is full or not writable.
        """
        if name not in self.records:
            value = make()
            with together(self.comm):
                self.record(name, value)
        return self.records[name]


class BareRun:
    """A job under way on this rank: it is agreed on, and its model is found. Every rank must make one."""

    def __init__(self, job: BareJob, group: dist.ProcessGroup | None, device: Device, watcher: Watcher | None) -> None:
        self.comm, self._dtype = communicator(group), job.dtype
        self.reporter = Reporter(watcher or Watcher(), self.comm)
        self.seconds: dict[str, float] = {}
        with together(self.comm) as facts:
            job.check()
            self.device = as_device(device)
            facts |= {**job.flags(), "device": self.device.type}
        path = resolve_model(job.model, group=self.comm, log=self.reporter.say)
        self.directory = open_together(self.comm, path)
        self.inputs = [path]  # beside those that the job names
        with together(self.comm):
            self.output = job.check(path)
            self._mesh = mesh_of(self.comm, self.device)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the model. Local; raises as :func:`load_tokenizer`."""
        return load_tokenizer(self.directory.path)

    @cached_property
    def config(self) -> Any:
        """The configuration of the model. Local; raises as :func:`load_config`."""
        return load_config(self.directory.path)

    @contextmanager
    def stage(self, key: str, name: str, unit: str = "") -> Iterator[Progress]:
        """Time a stage, and yield what tells how far it is in its ``unit``, if it has one. Every rank must enter it."""
        with clock(self.seconds, key):
            if unit:
                with self.reporter.stage(name, unit) as progress:
                    yield progress
            else:
                self.reporter.begin(name)
                yield None

    def load(
        self,
        directory: HfDirectory | None = None,
        *,
        dtype: torch.dtype | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Return the model: whole on one rank, sharded by FSDP2 over several.

        Or that of another ``directory``; in another ``dtype`` than is written, and with ``compute_dtype``, which are
        those of :func:`load_model`.
        """
        with self.stage("load", "loading", "bytes") as progress:
            return load_model(
                directory or self.directory,
                mesh=self._mesh,
                dtype=dtype or self._dtype,
                compute_dtype=compute_dtype,
                device=self.device,
                group=self.comm,
                progress=progress,
            )

    @contextmanager
    def one_dtype(self) -> Iterator[None]:
        """Say how a model runs that is stored in several dtypes, in which it does not. Local.

        Raises:
            ValueError: it does not.
        """
        try:
            yield
        except (RuntimeError, AssertionError) as error:
            held = [(name, entry.dtype) for name, (_, entry) in self.directory.tensors.items()]
            stored = {dtype: name for name, dtype in held[::-1] if dtype.is_floating_point}
            if self._dtype is not None or len(stored) < 2 or "dtype" not in str(error):
                raise
            said = " and ".join(f"{name!r} as {dtype}" for dtype, name in stored.items())
            raise ValueError(
                f"{self.directory.path} holds {said}, and does not run in several dtypes: name one of them, which all "
                f"weights are then written in (dtype=..., --dtype): {str(error).splitlines()[0]}"
            ) from error


class Run(BareRun):
    """The run of a job that writes a model. Every rank must make one, and call its methods in the same order.

    Making it also tokenizes the texts to evaluate on, which the model must have positions for, and loads the tasks.
    """

    files: JobFiles | None = None  # from :meth:`begin` on

    def __init__(self, job: Job, group: dist.ProcessGroup | None, device: Device, watcher: Watcher | None) -> None:
        super().__init__(job, group, device, watcher)
        self.job = job
        with together(self.comm) as facts:
            self.read: dict[str, object] = {"model files": self.directory.fingerprint()}  # again, when it goes on
            length, most = job.evaluation_length, job.evaluation_tokens
            self._texts = {
                name: tokenize_file(self.tokenizer, name, max_tokens=most, sequence_length=length)
                for name in job.evaluate_on
            }
            for ids in self._texts.values():
                check_fit(ids, self, length, "evaluation_length (--eval-length)")
            self._tasks = load_tasks(job.tasks) if job.tasks else None
            facts |= {f"evaluation tokens of {name}": token_digest(ids) for name, ids in self._texts.items()}
            digest = new_digest(json.dumps([facts, job.tasks, length]).encode()).hexdigest()
            self.evaluation = f"before-{digest[:12]}"  # the record of what is evaluated before
        self._started = time.perf_counter()

    def note_weights(self, what: str, directory: HfDirectory) -> None:
        """Note all bytes of the weight files of a ``directory``, which a job that goes on must find again.

        Every rank must call it, and reads its share: a round of 24 bytes a file.

        Raises:
            OSError: on every rank: one cannot be read.
        """
        digests = [file_digest(self.comm, file.path) for file in directory.weight_files]
        self.read[f"{what} weights"] = " ".join(digests)

    def begin(self, *, sync: bool = True) -> JobFiles:
        """Return the folder of the job: a new one or, with ``resume``, the one that is there.

        A resumed job must have the options that decide the result, have read the same files and be run by the same
        versions; on how many ranks is no matter. Every rank must call it: five rounds.

        Raises:
            FileExistsError: on every rank: an unfinished job is there, and ``resume`` is off.
            ValueError: on every rank: the folder is another job's, or a record in it is damaged.
        """
        comm, folder, resume = self.comm, unfinished_of(self.output), self.job.resume
        with together(comm):
            recipe = json.loads(json.dumps({**self.job.flags(deciding=True), **_VERSIONS, **self.read}))
            there = _read_records(folder) if comm.rank == 0 else []
        before, records = comm.broadcast(there)
        with together(comm):
            if comm.rank == 0 and records:  # paths may lead elsewhere on other machines
                _check_same(folder, before, recipe, resume)
            elif comm.rank == 0:
                _make_folder(folder, recipe)
            self.files = JobFiles(comm, folder, records, sync=sync)
        if resume and not records:
            self.reporter.say("nothing was recorded yet: starting at the beginning")
        with together(comm):
            check_shared(folder / RESULT_NAME)
        return self.files

    def keep_or_remove(self, error: BaseException) -> None:
        """Keep the folder after an ``error`` if anything is recorded in it; else remove it. Local.

        After a mistake in the input that is found at the first start only the state of a training is kept.
        """
        files = self.files
        if files is None:
            return
        is_input = isinstance(error, _AT_FAULT) and is_expected(error) and not files.was_begun
        if files.known(STATE) is not None if is_input else files.records:
            if "resume=" not in str(error):
                self.reporter.say(f"what is done is kept in {files.folder}; resume=True (--resume) goes on with it")
        elif self.comm.rank == 0:
            remove_tree(files.folder)

    def save(self, model: nn.Module, folder: Path, *, layers: Sequence[int] | None = None) -> None:
        """Write ``model`` into ``folder``, as :func:`save_model` does. Every rank must call it."""
        with self.stage("save", "saving", "bytes") as progress:
            save_model(model, self.directory, folder, layers=layers, group=self.comm, progress=progress)

    def evaluate(self, model: nn.Module, when: str) -> dict[str, Any]:
        """Return the perplexity on each text to evaluate on, and the metrics of each task, as a record has them."""
        of_texts: dict[str, float] = {}
        of_tasks: dict[str, dict[str, float]] = {}
        texts, length = [*self._texts.values()], self.job.evaluation_length
        if texts:
            where = Path(next(iter(self._texts))).name if len(texts) == 1 else f"{len(texts)} texts"
            with self.stage("evaluate", f"evaluating {when} on {where}", "windows") as progress:
                values = perplexities(model, texts, sequence_length=length, group=self.comm, progress=progress)
            of_texts = dict(zip(self._texts, values, strict=True))
        if self._tasks is not None:
            with self.stage("tasks", f"tasks {when}", "requests") as progress:
                of_tasks = run_tasks(self._tasks, model, self.tokenizer, self.comm, progress)
        return {"perplexity": of_texts, "tasks": of_tasks}

    def report(self, before: dict[str, Any], after: dict[str, Any], work: _W) -> JobReport[_W]:
        """Return the report of a job that has done its ``work``; ``before``, ``after``: of :meth:`evaluate`.

        The first rank writes it, its model card and its picture beside the weights. Every rank must call it: one round
        of 64 bytes, and one of 8 bytes a rank, with CUDA two.

        Raises:
            OSError: on every rank: the disk is full or not writable.
            RuntimeError: on every rank: the watcher of one has failed.
        """
        self.seconds["total"] = time.perf_counter() - self._started
        on_device = partial(torch.cuda.max_memory_allocated, self.device)
        memory, has_device = peak_memory(self.comm), self.device.type == "cuda"
        device_memory = peak_memory(self.comm, on_device) if has_device else ()
        with together(self.comm):
            report = JobReport(
                job=self.job,
                model=self.directory.path,
                versions={**_VERSIONS, "python": platform.python_version()},
                num_ranks=self.comm.size,
                device=self.device.type,
                before=Evaluation(**before),
                after=Evaluation(**after),
                seconds=self.seconds,
                work=work,
                peak_memory=memory,
                peak_device_memory=device_memory,
            )
            if self.comm.rank == 0 and self.files is not None:
                folder = self.files.result
                write_report(report.to_dict(), folder)
                named: Callable[[str], str] = kind_of if isinstance(work, SmallerModel) else str  # numbers change
                there = set(map(named, open_directory(folder).tensors))
                if lost := sorted(name for name in self.directory.tensors if named(name) not in there):
                    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
                    self.reporter.say(f"not in the output, since transformers does not load it: {lost[0]!r}{more}")
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


@contextmanager
def open_job(job: Job, group: dist.ProcessGroup | None, device: Device, watcher: Watcher | None) -> Iterator[Run]:
    """Yield the job under way, with the lock of its output; when the body ends, what it has written is the output.

    Every rank must enter it, and call :meth:`Run.begin` in the body. If the body raises, see
    :meth:`Run.keep_or_remove`. Two rounds of 64 bytes, and those of :class:`Run` and :func:`publish`.

    Raises:
        OSError, ValueError: on every rank: another job holds the lock, or has filled the output since the first look;
            or as :func:`publish` raises.
    """
    run = Run(job, group, device, watcher)
    comm = run.comm

    def check() -> Path:
        return job.check(*run.inputs)

    with locking(comm, run.output):
        with together(comm):
            if comm.rank == 0:
                check()
        try:
            with run.one_dtype():
                yield run
        except BaseException as error:  # also Ctrl-C and SIGTERM
            run.keep_or_remove(error)
            raise
        assert run.files is not None
        publish(comm, run.files.result, run.output, check, sync_files=run.files.sync)


def _read_records(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the recipe, and all records by their names. Local."""
    records: dict[str, Any] = {path.stem: read_json(path).get("value") for path in sorted(folder.glob("*.json"))}
    return records.pop(Path(RECIPE_NAME).stem, {}), records


def _make_folder(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Make the folder with its recipe, and what will be the output last. Local; for one rank."""
    if (folder / RECIPE_NAME).exists():  # killed before anything was recorded
        remove_tree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_tree(partial_of(folder / RECIPE_NAME))
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds more than a job has written; move it away")
    write_whole(folder / RECIPE_NAME, json.dumps({"value": recipe}).encode())
    (folder / RESULT_NAME).mkdir()


def _check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], resume: bool) -> None:
    if not resume:
        raise FileExistsError(f"{folder} is an unfinished job; resume=True (--resume) goes on with it, or remove it")
    different = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if different:
        shown = "; ".join(f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in different)
        raise ValueError(f"{folder} cannot be resumed, the job was another: {shown}; ask for the same, or remove it")


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write ``report.json``. Local; for one rank."""
    # JSON has no numbers for infinities and NaN: they are text.
    strict = json.loads(json.dumps(report), parse_constant=lambda constant: str(float(constant)))
    text = json.dumps(strict, indent=2, allow_nan=False) + "\n"
    write_whole(folder / REPORT_NAME, text.encode(), sync=False)
