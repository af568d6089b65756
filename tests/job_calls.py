"""What jobs call, and whole jobs, for tests of what the other ranks do when one meets an error."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune.checkpoint.hf_load import load_model
from distprune.checkpoint.hub import resolve_model
from distprune.collectives.communicator import communicator
from distprune.jobs import FinetuneJob, PruneJob, ShrinkJob, Trained, run_finetune_job, run_shrink_job
from distprune.jobs.block_files import BlockFiles
from distprune.jobs.masked_training import MaskedTraining
from distprune.jobs.options import Job
from distprune.jobs.run import JobFiles, Run
from distprune.models.decoder_blocks import decoder_blocks
from distprune.removal.experts import choose_experts
from distprune.removal.layers import LayerCriterion, order_layers
from distprune.removal.rebuild import remove_units
from tests.architectures import samples, tiny_model
from tests.worlds import drawing

__all__ = ["JOBS", "JOB_CALLS", "LEFT_OUT", "STEPS", "Called", "Make"]

Called = tuple[nn.Module, Callable[[], object]]  # what a rank holds, and what it calls
Make = Callable[[int, Path], Called]

# Jobs of whose forwards FSDP2's own collectives are a part: what lies outside of them is looked at.
JOBS = ("shrink", "finetune")
STEPS = "jobs/masked_training.py"  # but for its forwards and backwards it has a row of its own
# What a job goes on without: its picture, its card, and the removal of its lock.
LEFT_OUT = ("jobs/picture.py", "jobs/model_card.py", "figure.py", "checkpoint/output_lock.py")


_NUMBERS = {rank: itertools.count() for rank in range(2)}  # of files: one that was locked may stay so


def resolved(_: int, folder: Path) -> Called:
    return nn.Module(), lambda: resolve_model(str(folder / "model"))


def writing(*_: object) -> Called:
    model = tiny_model("llama", num_hidden_layers=1)
    return model, lambda: prune.own_words(model, 3, 3)


def masks_on_disk(loads: bool, rank: int, folder: Path) -> Called:
    model = nn.Linear(2, 2, bias=False, device="meta").to_empty(device="cpu")
    nn.init.ones_(model.weight)
    masks = prune.compute_masks(model, 0.5)
    path = folder / f"masks{next(_NUMBERS[rank])}"
    if not loads:
        return model, lambda: masks.save(path)
    masks.save(path)
    return model, lambda: prune.Masks.load(path, model)


def begun(_: int, folder: Path) -> Called:
    job = PruneJob(model=str(folder / "model"), output=str(folder / "begun"), sparsity=0.5)
    return nn.Module(), lambda: Run(job, None, "cpu", None)


def reported(_: int, folder: Path) -> Called:
    run = Run(PruneJob(model=str(folder / "model"), output=str(folder / "begun"), sparsity=0.5), None, "cpu", None)
    run.files = JobFiles(run.comm, folder / "reported", {})
    shutil.copytree(folder / "model", run.files.result, dirs_exist_ok=True)
    work = Trained("", 0, 0, 0.0, [], 0, 0, 0, 0, 0)
    return nn.Module(), lambda: run.report({}, {}, work)


def restored(_: int, folder: Path) -> Called:
    """A block of a killed job that is read back."""
    model = load_model(folder / "model", mesh=init_device_mesh("cpu", (2,)))
    name, _block = decoder_blocks(model)[0]
    run = Run(PruneJob(model=str(folder / "model"), output=str(folder / "begun"), sparsity=0.5), None, "cpu", None)
    files = JobFiles(run.comm, folder, {name: {}})
    blocks = BlockFiles(run, files, model, folder / "restored", [0])
    blocks._writer.write(blocks._path(name), blocks._stored[name])
    return model, lambda: blocks.finished(0)


def cut_apart(_: int, folder: Path) -> Called:
    """A model that gets smaller where it is; after an error it has to be loaded again."""
    model = load_model(folder / "model", mesh=init_device_mesh("cpu", (2,)))
    name, _block = decoder_blocks(model)[0]
    return nn.Module(), lambda: remove_units(model, {(name, "mlp", "mlp"): torch.arange(0, 28, 2)})


def experts_chosen(*_: object) -> Called:
    model = tiny_model("mixtral", num_hidden_layers=1)
    return model, lambda: choose_experts(model, samples(2, 4), 2)


def layers_ordered(by: LayerCriterion, *_: object) -> Called:
    model = tiny_model("llama", num_hidden_layers=2)
    return model, lambda: order_layers(model, samples(2, 4), 1, criterion=by, progress=lambda *_: None)


def to_train(*_: object) -> Called:
    with drawing(0):
        model = nn.Linear(16, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    prune.prune_model(model, 0.5, include="*")
    return model, lambda: MaskedTraining(communicator(), model, None, torch.float32)


def whole_job(job: Job, run: Callable[[Any], object]) -> Make:
    """The job on the model of the folder, each time into an output of its own."""
    outputs = {rank: itertools.count() for rank in range(2)}

    def make(rank: int, folder: Path) -> Called:
        output = folder / "jobs" / f"{job.output}{next(outputs[rank])}"
        texts: dict[str, Any] = {
            field: str(folder / "text.txt") for field in ("calibration", "data") if hasattr(job, field)
        }
        own = dataclasses.replace(job, model=str(folder / job.model), output=str(output), **texts)
        return nn.Module(), lambda: run(own)

    return make


JOB_CALLS: dict[str, tuple[int, Make]] = {
    "Masks.save": (2, partial(masks_on_disk, False)),
    "Masks.load": (2, partial(masks_on_disk, True)),
    "resolve_model": (2, resolved),
    "own_words": (2, writing),
    "Run": (2, begun),
    "Run.report": (2, reported),
    "BlockFiles.finished": (2, restored),
    "remove_units": (2, cut_apart),
    "choose_experts": (2, experts_chosen),
    "order_layers by influence": (2, partial(layers_ordered, "influence")),
    "order_layers by loss": (2, partial(layers_ordered, "loss")),
    "MaskedTraining": (2, to_train),
    "shrink": (
        2,
        whole_job(
            ShrinkJob(
                model="model",
                output="smaller",
                mlp=0.5,
                calibration="",
                samples=2,
                sequence_length=8,
                own_words=2,
            ),
            run_shrink_job,
        ),
    ),
    "finetune": (
        2,
        whole_job(
            FinetuneJob(
                model="pruned",
                output="tuned",
                data="",
                steps=2,
                batch_size=2,
                sequence_length=8,
                compute_dtype=torch.float32,
                save_every=0.0,
            ),
            run_finetune_job,
        ),
    ),
}
