"""A line where memory runs out: in which stage, how much was asked for, and what takes less."""

from __future__ import annotations

import errno
import re

import torch

from distprune.jobs import BareJob, FinetuneJob, PruneJob

_SAID = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory|not enough memory|bad_alloc")
# What takes less once the weights are loaded, by the field of a job.
_WAYS = {
    "offload": "--offload",
    "samples": "fewer --samples",
    "batch_size": "a smaller --batch-size",
    "sequence_length": "a smaller --sequence-length",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the system, or a device, had no more memory to give."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    has_said = isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None
    return has_said or isinstance(error, MemoryError | torch.OutOfMemoryError)


def memory_line(error: BaseException, stage: str, job: BareJob) -> str:
    """Return the line for ``error``, which a ``job`` met in ``stage``."""
    ways = [way for name, way in _WAYS.items() if getattr(job, name, True) is not True]
    if stage in ("starting", "loading"):
        ways.clear()
    if job.dtype is None and not isinstance(job, FinetuneJob):  # which trains in float32
        ways.append("--dtype bfloat16")
    if type(job) is PruneJob and not job.evaluate_on and not job.tasks:
        ways.append("--streamed, which does not load the model")
    said = (str(error).splitlines() or [repr(error)])[0]
    return f"out of memory while {stage}: {said}. Ways out: {', '.join([*ways, 'more ranks'])}"
