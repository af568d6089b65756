"""A line where memory runs out: in which stage, how much was asked for and how much is left, and what takes less."""

from __future__ import annotations

import errno
import re

import torch

from distprune.calibration.available import available_bytes
from distprune.jobs import BareJob, FinetuneJob, PruneJob
from distprune.mistakes import was_told
from distprune.oneshot.room import gibibytes

_SAID = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|not enough memory|bad_alloc")
_WANTED = re.compile(r"allocate ([\d.]+) (bytes|[KMGTPE]iB)")
_RANK = re.compile(r"rank \d+")
# What takes less once the weights are loaded, by the field of a job.
_WAYS = {
    "offload": "--offload",
    "samples": "fewer --samples",
    "batch_size": "a smaller --batch-size",
    "sequence_length": "a smaller --sequence-length",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system, or a device, had no more memory to give."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


def memory_line(error: BaseException, stage: str, job: BareJob | None, device: torch.device) -> str:
    """Return the line for ``error``, which a ``job`` on ``device`` met in ``stage``."""
    said = str(error)
    on_device = device.type == "cuda" and "CUDA" in said
    where = device if on_device else torch.device("cpu")
    here = _RANK.match(said) if was_told(error) else None
    parts = []
    if wanted := _WANTED.search(said):
        size = gibibytes(float(wanted[1])) if wanted[2] == "bytes" else f"{wanted[1]} {wanted[2]}"
        parts.append(f"{size} more were asked for")
    if here is None and (free := available_bytes(where)) is not None:
        parts.append(f"{gibibytes(free)} are free")
    sizes = f": {', '.join(parts)}" if parts else ""
    on = f"{here[0]} has run out of memory" if here else "out of memory"
    ways = "" if job is None else f". Ways out: {', '.join(_ways(stage, job))}"
    return f"{on} {'on a device ' if on_device else ''}while {stage}{sizes}{ways}"


def _ways(stage: str, job: BareJob) -> list[str]:
    loads = stage in ("starting", "loading")
    ways = [] if loads else [way for name, way in _WAYS.items() if getattr(job, name, True) is not True]
    if job.dtype is None and not isinstance(job, FinetuneJob):  # which trains in float32
        ways.append("--dtype bfloat16")
    if type(job) is PruneJob and not job.evaluate_on and not job.tasks:
        ways.append("--streamed, which does not load the model")
    return [*ways, "more ranks"]
