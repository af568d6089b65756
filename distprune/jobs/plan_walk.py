"""What a one-shot job would take, instead of running it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from typing_extensions import override

from distprune.calibration.available import available_bytes
from distprune.calibration.data import load_samples
from distprune.calibration.own_words import SELF, texts_of, writing_bytes
from distprune.checkpoint.hub import resolve_model
from distprune.checkpoint.pretrained import build_on_meta, load_tokenizer
from distprune.checkpoint.shared_reading import open_together
from distprune.collectives.agree import agree, together
from distprune.collectives.communicator import communicator
from distprune.formatting import one_line
from distprune.jobs.fit_memory import num_on_machine
from distprune.jobs.one_shot import OneShotJob
from distprune.jobs.options import PLAN, ask, asked as asked_of, parse_bytes
from distprune.jobs.run import Device
from distprune.jobs.watcher import Reporter, Watcher
from distprune.jobs.words_file import read_words
from distprune.oneshot.memory_plan import MemoryPlan, fitted
from distprune.oneshot.model_shape import shape_of
from distprune.oneshot.walk_costs import WalkRequest


@asked_of
class PlanJob(OneShotJob):
    """Say what :class:`OneShotJob` would take, from the model's config. Nothing runs, and nothing is written."""

    plan: bool = ask(
        "Print which memory, traffic and time the job would take, and run nothing.",
        default=True,
        needs=("calibration", "method"),
        panel=PLAN,
    )
    ranks: int | None = ask(
        "Plan for so many ranks instead of those that are started.", default=None, least=1, most=1 << 20, panel=PLAN
    )
    device_memory: int | None = ask(
        "Plan for devices that have as much memory, such as 80G.",
        default=None,
        parse=parse_bytes,
        metavar="N[K|M|G|T]",
        panel=PLAN,
    )


@dataclass(frozen=True)
class PlannedWalk:
    """The ``plan`` for each of ``asked.num_ranks``.

    ``room``: the bytes that a rank can have ``where`` the walk is, if known; ``fits``: they are enough. The model
    writes ``num_written`` windows first, which takes ``writing`` bytes there beside the weights.
    """

    model: Path
    asked: WalkRequest
    plan: MemoryPlan
    where: str
    room: int | None
    fits: bool
    num_written: int
    writing: int

    @override
    def __repr__(self) -> str:
        return one_line(
            self, f"{self.model.name} on {self.asked.num_ranks} ranks {'fits' if self.fits else 'does not fit'}"
        )


def run_plan_job(
    job: PlanJob, *, group: dist.ProcessGroup | None = None, device: Device = "cpu", watcher: Watcher | None = None
) -> PlannedWalk:
    """Return what the job would take of each rank.

    Every rank of ``group`` (default: the default group, or this process alone) must call it, with the same job.

    Raises:
        ValueError, TypeError, NotImplementedError, OSError, ImportError: on every rank: a mistake in the job, the
            model or, where all of it is asked for, the text; the message says which.
    """
    comm = communicator(group)
    with together(comm):
        job.check_asked()
        device = torch.device(device)
    agree(comm, {**job.flags(), "device": device.type})
    path = resolve_model(job.model, group=comm, log=Reporter(watcher or Watcher(), comm).say)
    directory = open_together(comm, path)
    with together(comm):
        model, _ = build_on_meta(directory, job.dtype)
        shape = shape_of(model)
    num_text = job.samples or 0
    if job.samples is None and job.calibration != SELF:
        with together(comm):
            tokenizer = load_tokenizer(path)
        length, seed = job.sequence_length, job.seed
        samples = load_samples(
            tokenizer, job.calibration, model, num_samples=None, sequence_length=length, seed=seed, group=comm
        )
        num_text = len(samples)
    num_here = num_on_machine(comm)
    with together(comm):
        on_device = job.device_memory is not None or device.type != "cpu"
        room = job.device_memory or available_bytes(device)
        if room is not None and not on_device and job.ranks is None:
            room //= num_here
        words_file = job.own_words_file
        num_in_file = None if words_file is None else len(read_words(Path(words_file))[0])
        counts = job.counts(num_text, num_in_file)
        asked = job.of_walk(job.ranks or comm.size, counts.total, on_device=on_device)
        num_written = 0 if words_file is not None else counts.continuing + counts.own
        texts = [(counts.continuing, job.sequence_length), texts_of(counts.own, job.sequence_length)]
        writing = max(writing_bytes(model, *of, asked.num_ranks) for of in texts) if num_written else 0
        where = "a device" if on_device else "the host"

        def fits(plan: MemoryPlan) -> bool:
            walking = plan.most.device + (0.0 if on_device else plan.most.host)
            return room is None or max(walking, plan.most.device - plan.beyond_weights + writing) <= room

        fitting, plan = fitted(shape, asked, fits)
    return PlannedWalk(path, fitting, plan, where, room, fits(plan), num_written, writing)
