"""The job that recovers what pruning has cost: fine-tuning with the zeros held."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from distprune.calibration import Batches, check_fit
from distprune.checkpoint import HfDirectory, load_tokenizer, locking, open_directory, resolve_model
from distprune.checkpoint.hf_directory import CONFIG_NAME, read_json
from distprune.collectives import sum_together, together
from distprune.jobs.documents import write_documents
from distprune.jobs.finetune_job import FinetuneJob
from distprune.jobs.masked_training import MaskedTraining
from distprune.jobs.picture import can_draw
from distprune.jobs.report import JobReport, Trained
from distprune.jobs.run import Device, Run, clock
from distprune.jobs.steps import begin, train
from distprune.jobs.unfinished import open_unfinished
from distprune.jobs.watcher import Watcher
from distprune.models import find_shards
from distprune.shards import LocalShard, count_zeros

__all__ = ["run_finetune_job"]


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
    """
    run = Run(job, group, device, watcher)
    draws = can_draw(run.told.say)
    teacher_directory = _find_teacher(job, run)
    with locking(run.comm, run.output):
        with together(run.comm):
            batches = Batches(
                load_tokenizer(run.directory.path),
                job.data,
                batch_size=job.batch_size,
                length=job.sequence_length,
                seed=job.seed,
            )
        model = run.load(dtype=torch.float32, compute_dtype=job.compute_dtype)
        teacher = None if teacher_directory is None else run.load(teacher_directory, dtype=job.compute_dtype)
        with together(run.comm):
            for read in (model, *([] if teacher is None else [teacher])):
                check_fit(batches[0], read)
            run.read["training tokens"] = batches.digest()
        training = MaskedTraining(run.comm, model, teacher, job.compute_dtype)
        run.told.say(f"{training.num_zeros:,} of {training.num_elements:,} weights are zero, and stay so")
        with open_unfinished(run, job, same_ranks=False) as unfinished:
            before = unfinished.recall("before", lambda: run.evaluate(run.load(), "before") if run.evaluates else {})
            resumed_at = begin(job, run, training, unfinished)
            with clock(run.seconds, "train"):
                seconds, losses = train(job, run, training, batches, unfinished)
            with together(run.comm):
                shards = training.finish()
            del teacher, training
            written = run.load()
            num_zeros, num_elements = _take_over(run, written, shards)
            del model, shards
            after = run.evaluate(written, "after")
            unfinished.begin_result(run.output)
            parameters = [name for name, _ in written.named_parameters(remove_duplicate=False)]
            run.save(written, unfinished.result, updated=parameters)
            method = "masked fine-tuning" + ("" if job.teacher is None else ", distilled from the dense model")
            trained = Trained(
                method=method,
                num_steps=len(losses),
                num_tokens=len(losses) * job.batch_size * job.sequence_length,
                seconds=seconds,
                losses=losses,
                num_zeros=num_zeros,
                num_elements=num_elements,
                resumed_at=resumed_at,
            )
            return write_documents(run, unfinished.result, before, after, trained, draws=draws)


def _find_teacher(job: FinetuneJob, run: Run) -> HfDirectory | None:
    """Return where the teacher is, which reads and predicts the tokens of the model. Every rank must call it."""
    if job.teacher is None:
        return None
    path = resolve_model(job.teacher, group=run.comm, log=run.told.say)
    with together(run.comm):
        directory, own = open_directory(path), run.directory.path
        vocabularies = [load_tokenizer(folder).get_vocab() for folder in (path, own)]
        sizes = [read_json(folder / CONFIG_NAME).get("vocab_size") for folder in (path, own)]
        if vocabularies[0] != vocabularies[1] or sizes[0] != sizes[1]:
            raise ValueError(
                f"the teacher {path} has another tokenizer than {own}, or another vocabulary ({sizes[0]} tokens, and "
                f"{sizes[1]}): what they predict cannot be compared; name the dense model that was pruned"
            )
        run.inputs.append(path)
    run.note_files("teacher", directory)
    return directory


def _take_over(run: Run, model: nn.Module, shards: list[LocalShard]) -> tuple[int, int]:
    """Copy the trained ``shards`` into ``model``, in its dtypes; return how many elements are zero, of how many.

    Every rank must call it: one round.
    """

    def fill(words: torch.Tensor) -> None:
        for written, trained in zip(find_shards(model, "*").shards, shards, strict=True):
            written.local.copy_(trained.local)
            if trained.owned:
                words += torch.tensor([*count_zeros([written.local]), written.local.numel()])

    num_zeros, num_elements = sum_together(run.comm, (2,), fill).tolist()
    return num_zeros, num_elements
