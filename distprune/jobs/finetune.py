"""The job that recovers what pruning, or removal, has cost: fine-tuning with the zeros held."""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from distprune.calibration.data import Batches, WindowBatches, check_fit
from distprune.calibration.own_words import SELF
from distprune.checkpoint.hf_directory import HfDirectory, open_together
from distprune.checkpoint.hf_load import load_config, load_tokenizer
from distprune.checkpoint.hub import resolve_model
from distprune.checkpoint.output_lock import remove_tree
from distprune.collectives.agree import sum_together, together
from distprune.jobs.masked_training import MaskedTraining
from distprune.jobs.options import MOST, RUNNING, TRAINING, Job, ask, asked
from distprune.jobs.own_words import Windows, ask_words, load_windows
from distprune.jobs.report import JobReport, Trained
from distprune.jobs.run import STATE, Device, JobFiles, Run, open_job
from distprune.jobs.watcher import Watcher
from distprune.kernels.held import count_zeros
from distprune.models.find_shards import find_shards
from distprune.oneshot.report import clock
from distprune.shards.local_shard import LocalShard

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_WARM_UP = 0.1  # of the job: the learning rate rises, and then falls to zero
_NUM_SAID = 20  # times that the loss is
_NUM_WINDOWS = 512  # that a teacher writes, if nothing is said


@asked
class FinetuneJob(Job):
    """Train a model with its zeros held: a pruned one, a smaller one, or any other.

    The learning rate is at its highest after a tenth of the job. With a teacher the loss is the Kullback-Leibler
    divergence from what it predicts.

    Args:
        data: Text or JSON-lines file to train on. self: the --teacher writes it.
        own_words: Without a text: windows that the teacher writes (512). Or a file that distprune sample has written:
            all windows in it.
        steps: How many steps to do; or else --minutes.
        minutes: How long to train, without the time to load, evaluate and write; or else --steps.
        teacher: The dense model: learn what it predicts, and not the text.
        learning_rate: Of AdamW, at its highest.
        batch_size: Windows a step, over all ranks.
        sequence_length: Tokens in each.
        compute_dtype: Of forwards. Weights are trained in float32.
        save_every: Seconds between states that --resume can go on with.
    """

    data: str = ask(default=SELF, is_file=True, metavar="PATH|self", panel=TRAINING)
    own_words: int | str | None = ask_words(TRAINING)
    steps: int | None = ask(default=None, least=1, panel=TRAINING)
    minutes: float | None = ask(default=None, above=0, panel=TRAINING)
    teacher: str | None = ask(default=None, is_file=True, panel=TRAINING)
    learning_rate: float = ask(default=2e-4, above=0, panel=TRAINING)
    batch_size: int = ask(default=8, least=1, most=MOST, panel=TRAINING)
    sequence_length: int = ask(default=256, least=2, most=MOST, panel=TRAINING)
    compute_dtype: torch.dtype = ask(default=torch.bfloat16, choices=_DTYPES, panel=TRAINING)
    save_every: float = ask(default=300.0, least=0, decides=False, panel=RUNNING)

    @override
    def check_asked(self) -> None:
        super().check_asked()
        if (self.steps is None) == (self.minutes is None):
            both = "" if self.steps is None else f", not both {self.steps} and {self.minutes}"
            raise ValueError(f"give steps (--steps) or minutes (--minutes){both}")
        if self.data == SELF and self.teacher is None and not isinstance(self.own_words, str):
            raise ValueError("give data (--data) to train on, or a teacher (--teacher), which writes it")
        if self.data != SELF and self.own_words is not None:
            raise ValueError(f"own_words={self.own_words!r} (--own-words) are a teacher's, not of data={self.data!r}")
        if self.data == SELF and self.own_words == 0:
            raise ValueError("own_words=0 (--own-words 0) leaves nothing to train on")

    def share(self, num_steps: int, seconds: float) -> float:
        """Return how much of the job is done after so many steps and seconds."""
        return num_steps / self.steps if self.steps is not None else seconds / (60 * (self.minutes or 1))


def run_finetune_job(
    job: FinetuneJob, *, group: dist.ProcessGroup | None = None, device: Device = "cpu", watcher: Watcher | None = None
) -> JobReport[Trained]:
    """Run the job and return its report. The output is written whole, or not at all.

    AdamW in float32, with forwards in ``compute_dtype`` and gradients cut to a norm of 1. Every zero of the input is
    held, in every tensor, and that is checked before the output appears. A batch follows from the seed and the step, on
    any number of ranks. A job that was killed goes on with ``resume`` from the last state saved beside the output, also
    on another number of ranks; on the same one, and counted in steps, it ends with the same bytes.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same
    job; several ranks hold the models sharded by FSDP2. Communicates what the functions it calls do; a step what FSDP2
    does, and three rounds of 64 bytes at most.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job, a
            model or the text, or a loss that is no number; the message says which.
        FileExistsError: on every rank: an unfinished job is there without ``resume``, or with it a finished one.
        Exception: what a step raises, out of memory first of all, at once on its rank alone. The others raise when its
            process ends (over NCCL at the group's timeout); the command line ends them within seconds.
    """
    with open_job(job, group, device, watcher) as run:
        teacher_directory = _find_teacher(job, run)
        data = _find_data(job, run, teacher_directory)
        model = run.load(dtype=torch.float32, compute_dtype=job.compute_dtype)
        run.note_weights("model", run.directory)
        teacher = None if teacher_directory is None else run.load(teacher_directory, dtype=job.compute_dtype)
        training = MaskedTraining(run.comm, model, teacher, job.compute_dtype)
        run.reporter.say(f"{training.num_zeros:,} of {training.num_elements:,} weights are zero, and stay so")
        files = run.begin()
        batches: Batches | WindowBatches
        if isinstance(data, Windows):
            words = data.samples(run, teacher or model, files)
            batches = WindowBatches(words, batch_size=job.batch_size, seed=job.seed)
        else:
            batches = data
        evaluates = bool(job.evaluate_on or job.tasks)
        before = files.recall(run.evaluation, lambda: run.evaluate(run.load(), "before") if evaluates else {})
        with clock(run.seconds, "train"):
            seconds, losses, resumed_at = _train(job, run, training, batches, files)
        with together(run.comm):
            shards = training.finish()
        method = "masked fine-tuning" if training.num_zeros else "fine-tuning"
        method += "" if job.teacher is None else ", distilled from the dense model"
        del teacher, training
        written = run.load()
        counts = _take_over(run, written, shards)
        del model, shards
        after = run.evaluate(written, "after")
        run.save(written, files.result)
        num_tokens = len(losses) * job.batch_size * job.sequence_length
        trained = Trained(method, len(losses), num_tokens, seconds, losses, **counts, resumed_at=resumed_at)
        return run.report(before, after, trained)


def _find_teacher(job: FinetuneJob, run: Run) -> HfDirectory | None:
    """Return where the teacher is, which reads and predicts the tokens of the model. Every rank must call it."""
    if job.teacher is None:
        return None
    path = resolve_model(job.teacher, group=run.comm, log=run.reporter.say)
    directory, student = open_together(run.comm, path), run.directory.path
    with together(run.comm):
        vocabularies = [tokenizer.get_vocab() for tokenizer in (load_tokenizer(path), run.tokenizer)]
        configs = [load_config(folder).get_text_config(decoder=True) for folder in (path, student)]
        sizes = [getattr(config, "vocab_size", None) for config in configs]
        if vocabularies[0] != vocabularies[1] or sizes[0] != sizes[1]:
            raise ValueError(
                f"the teacher {path} has another tokenizer than {student}, or another vocabulary ({sizes[0]} tokens, "
                f"and {sizes[1]}): what they predict cannot be compared; name the model that was pruned or made smaller"
            )
        run.inputs.append(path)
    run.note_weights("teacher", directory)
    return directory


def _find_data(job: FinetuneJob, run: Run, teacher: HfDirectory | None) -> Batches | Windows:
    """Return the text, noted, or the windows of a file, or that the teacher is to write. Every rank must call it."""
    size, length = job.batch_size, job.sequence_length
    if job.data == SELF:
        return load_windows(run, SELF, _NUM_WINDOWS, job.own_words, length)
    with together(run.comm):
        text = Batches(run.tokenizer, job.data, batch_size=size, length=length, seed=job.seed)
        for directory in (run.directory, teacher or run.directory):
            check_fit(text[0], SimpleNamespace(config=load_config(directory.path)))
        run.read["training tokens"] = text.digest()
    return text


def _take_over(run: Run, model: nn.Module, shards: list[LocalShard]) -> dict[str, int]:
    """Copy the trained ``shards`` into ``model``, in its dtypes; return how many elements are zero, of how many.

    Every rank must call it: one round.
    """

    def fill(words: torch.Tensor) -> None:
        prunable = {shard.name for shard in find_shards(model).shards}
        for written, trained in zip(find_shards(model, "*").shards, shards, strict=True):
            written.local.copy_(trained.local)
            if trained.owned:
                counts = [*count_zeros([written.local]), written.local.numel()]
                counts += counts if written.name in prunable else [0, 0]
                words += torch.tensor(counts, dtype=torch.int64, device="cpu")

    names = ("num_zeros", "num_elements", "num_prunable_zeros", "num_prunable")
    return dict(zip(names, sum_together(run.comm, (4,), fill).tolist(), strict=True))


def _train(
    job: FinetuneJob, run: Run, training: MaskedTraining, batches: Batches | WindowBatches, files: JobFiles
) -> tuple[float, list[float], int]:
    """Do all steps that are left; return the seconds and the losses of all, and how many an earlier run has done.

    Every rank must call it: three rounds a step. What time it is the first rank says.

    Raises:
        ValueError: on every rank: a loss, or a gradient, that is no finite number.
    """
    saved = files.known(STATE) or {"losses": [], "seconds": 0.0}
    losses, before = list[float](saved["losses"]), float(saved["seconds"])
    seconds, resumed_at = before, len(losses)
    if resumed_at:
        training.read(_state_of(files, resumed_at), resumed_at)
        run.reporter.say(f"going on after step {resumed_at}")
    num_saved, started = resumed_at, time.perf_counter()
    saved_at = started  # a save may take longer than the time between two: it counts from the end of the last

    def fill(words: torch.Tensor, parts: tuple[float, float]) -> None:
        now = time.perf_counter()
        clocks = [before + now - started, now - saved_at] if run.comm.rank == 0 else [0.0, 0.0]
        words.copy_(torch.tensor([*parts, *clocks], dtype=torch.float64, device="cpu"))

    unit, total = ("steps", job.steps or 0) if job.minutes is None else ("seconds", math.ceil(60 * job.minutes))
    with run.reporter.stage("training", unit) as progress:
        while (share := job.share(len(losses), seconds)) < 1:
            with together(run.comm):
                run.reporter.check_here()
                batch = batches[len(losses)]
                check_fit(batch, training.model)
            parts = training.backward(batch)
            sums = sum_together(run.comm, (4,), partial(fill, parts=parts), torch.float64)
            loss, squares, seconds, unsaved_seconds = sums.tolist()
            if not math.isfinite(loss + squares):
                kept = f"; the state after step {num_saved} is kept" if num_saved else ""
                raise ValueError(
                    f"step {len(losses) + 1}: the loss is {loss:g} and the squared norm of its gradient {squares:g}; "
                    f"try a lower --learning-rate, or --compute-dtype float32{kept}"
                )
            now = min(job.share(len(losses) + 1, seconds), 1.0)
            middle = (share + now) / 2
            with together(run.comm):
                factor = min(middle / _WARM_UP, (1 - middle) / (1 - _WARM_UP))
                training.step(job.learning_rate * factor, math.sqrt(squares))
            losses.append(loss)
            if int(now * _NUM_SAID) > int(share * _NUM_SAID) or len(losses) == 1:
                run.reporter.say(f"step {len(losses)}: loss {loss:.4f}, {now:.0%} done")
            progress(round(now * total), total)
            if now < 1 and unsaved_seconds >= job.save_every:
                _save(run, training, files, seconds, losses)
                num_saved, saved_at = len(losses), time.perf_counter()
    return seconds, losses, resumed_at


def _state_of(files: JobFiles, num_steps: int) -> Path:
    return files.folder / f"state-{num_steps}"


def _save(run: Run, training: MaskedTraining, files: JobFiles, seconds: float, losses: list[float]) -> None:
    """Write the state beside the one before, and record it in its place. Every rank must call it."""
    path = _state_of(files, len(losses))
    training.write(path)
    with together(run.comm):
        files.record(STATE, {"seconds": seconds, "losses": losses})
        if run.comm.rank == 0:
            for other in files.folder.glob("state-*"):
                if other != path:
                    remove_tree(other)
