"""What a person reads when a job is done: at most 20 lines of 80 columns. All of it is in report.json."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from distprune.checkpoint.inspect import InspectReport, TensorReport
from distprune.formatting import count, gibibytes, share
from distprune.jobs import JobReport, PlannedWalk, Sampled, Trained, Work
from distprune.jobs.options import REPORT_NAME
from distprune.jobs.picture import kind_of
from distprune.jobs.report import inspection_rows, laid_out, memory_rows

_MOST_KINDS = 15  # of tensors


def summary(report: JobReport[Work] | PlannedWalk | Sampled | InspectReport) -> list[str]:
    """Return what was done, what it took, and what to do next; of a directory, how sparse it is."""
    if isinstance(report, JobReport):
        return _of_job(report)
    if isinstance(report, PlannedWalk):
        return _of_plan(report)
    return _of_sample(report) if isinstance(report, Sampled) else _of_directory(report)


def _of_job(report: JobReport[Work]) -> list[str]:
    job, output = report.job, report.job.output
    words = ["finetune", output, "--teacher", job.model, "--minutes", "10", "--output", f"{output}-finetuned"]
    if isinstance(report.work, Trained):
        words = ["compare", job.model, output] if (report.model / REPORT_NAME).is_file() else ["inspect", output]
    written = ("output", f"{output} (report.json there has all)")
    return [*str(report).splitlines(), *laid_out([written]), _next(words)]


def _of_sample(sampled: Sampled) -> list[str]:
    num_tokens = sampled.num_samples * sampled.sequence_length
    shown = [
        ("windows", f"{sampled.num_samples:,} of {sampled.sequence_length:,} tokens"),
        ("seconds", f"{sampled.seconds:.1f}, {num_tokens / max(sampled.seconds, 1e-9):,.0f} tokens a second"),
        *memory_rows(sampled.peak_memory),
        ("output", str(sampled.path)),
    ]
    words = ["prune", sampled.model, "--sparsity", "0.5", "--own-words", str(sampled.path), "--output", "pruned"]
    return [f"{Path(sampled.model).name}, own words written", *laid_out(shown), _next(words)]


def _of_plan(walk: PlannedWalk) -> list[str]:
    """Return how much memory a job would take of each rank."""
    total = gibibytes(sum(walk.terms.values()))
    terms = [f"  {gibibytes(num_bytes):>10}  {name}" for name, num_bytes in walk.terms.items()]
    ranks = f"{walk.num_ranks} rank{'s' if walk.num_ranks > 1 else ''}"
    return [f"{walk.model}, {walk.num_windows} windows on {ranks}: {total} of memory a rank", *terms]


def _of_directory(report: InspectReport) -> list[str]:
    """Return the totals of a directory, and its kinds of tensors, in at most 25 lines."""
    shown = [*inspection_rows(report), ("tensors", f"{len(report.tensors):,}")]
    lines = [report.path, *laid_out(shown), "  sparsity  weights  tensors"]
    kinds: dict[str, list[TensorReport]] = {}
    for tensor in report.tensors:
        kinds.setdefault(kind_of(tensor.name), []).append(tensor)
    for name, tensors in [*kinds.items()][:_MOST_KINDS]:
        num_zeros, num_elements = sum(one.num_zeros for one in tensors), sum(one.num_elements for one in tensors)
        patterns = [pattern for pattern in tensors[0].patterns if all(pattern in one.patterns for one in tensors)]
        zero = share(num_zeros / max(num_elements, 1))
        lines.append(f"  {zero:>8}{count(num_elements):>9}{len(tensors):>9}  {'  '.join([name, *patterns])}")
    more = f", and {len(kinds) - _MOST_KINDS} more kinds" if len(kinds) > _MOST_KINDS else ""
    return [*lines, f"  --json prints all tensors{more}"]


def _next(words: Sequence[str]) -> str:
    """Return the line of a command of ours, however long: it is there to be copied."""
    return f"  {'next':<11}  {shlex.join(['distprune', *words])}"
