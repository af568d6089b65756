"""A line where memory runs out: in which stage, how much was asked for, and what takes less."""

from __future__ import annotations

from distprune.jobs import BareJob, FinetuneJob, PruneJob

# What takes less once the weights are loaded, by the field of a job.
_WAYS = {
    "offload": "--offload",
    "samples": "fewer --samples",
    "batch_size": "a smaller --batch-size",
    "sequence_length": "a smaller --sequence-length",
    "expert_memory": "less --expert-memory of a mixture",
}


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
    said = ". ".join([said, *getattr(error, "__notes__", [])[:1]])  # an estimate; the other is of Python's ways out
    return f"out of memory while {stage}: {said}. Ways out: {', '.join([*ways, 'more ranks'])}"
