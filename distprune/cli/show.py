"""What a person sees: progress on standard error, a summary on standard output; the first rank only.

Showing never decides about the work: the terminal may be gone. A summary of a job has at most 20 lines; all is
in report.json.
"""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from distprune.checkpoint.hub import name_of_model
from distprune.checkpoint.inspect import InspectReport, TensorReport
from distprune.checkpoint.optional_packages import import_extra
from distprune.formatting import count, gibibytes, printable, share
from distprune.jobs import JobReport, PlannedWalk, Sampled, Trained, Watcher, Work
from distprune.jobs.options import REPORT_NAME
from distprune.jobs.picture import kind_of, mean_error
from distprune.jobs.report import inspection_rows, laid_out, memory_rows

_IN_A_LOG = {"mininterval": 30, "delay": 30, "ncols": 80, "ascii": True}  # of tqdm: a line in as many seconds
_MOST_KINDS = 15  # of tensors


class Display(Watcher):
    """Shows things on one rank, and nothing on the others. ``stage``: what the job does now."""

    def __init__(self, *, visible: bool) -> None:
        self.stage = "starting"
        self._visible, self._is_terminal = visible, sys.stderr.isatty()
        self._tqdm = import_extra("tqdm", "hf").tqdm
        self._bar: Any = None

    @override
    def say(self, text: str) -> None:
        if self._visible:
            write = self._tqdm.write if self._is_terminal else print  # in a log tqdm would draw a bar that is not due
            write(printable(text), file=sys.stderr)

    @override
    def begin(self, stage: str) -> None:
        if stage != self.stage:
            self.close()
        self.stage = stage

    @override
    def progress(self, stage: str, unit: str, done: int, total: int) -> None:
        """Draw a bar; in a log, of a stage that takes long, a line now and then."""
        self.begin(stage)
        if not self._visible:
            return
        if self._bar is None:
            settings = {} if self._is_terminal else _IN_A_LOG
            units = {"unit": unit, "unit_scale": unit == "bytes"}
            self._bar = self._tqdm(desc=stage, leave=False, initial=done, total=total, **units, **settings)
        self._bar.update(done - self._bar.n)

    @override
    def block(self, report: Mapping[str, Any], num_blocks: int) -> None:
        error, num_done = mean_error(report["layers"]), report["index"] + 1
        shown = "none" if error is None else f"{error:.4f}"
        self.say(f"pruned {report['name']}, {num_done} of {num_blocks} blocks: relative error {shown}")
        self.progress(self.stage, "blocks", num_done, num_blocks)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def show(self, lines: Sequence[str]) -> None:
        """Print a summary."""
        if self._visible:
            sys.stdout.write(printable("\n".join(lines)) + "\n")


def summary(report: JobReport[Work] | PlannedWalk | Sampled | InspectReport) -> list[str]:
    """Return what was done, what it took, and what to do next; of a directory, how sparse it is."""
    if isinstance(report, JobReport):
        return _of_job(report)
    if isinstance(report, PlannedWalk):
        return _of_plan(report)
    return _of_sample(report) if isinstance(report, Sampled) else _of_directory(report)


def _of_job(report: JobReport[Work]) -> list[str]:
    job, output = report.job, report.job.output
    words = ["finetune", output, "--teacher", job.model, "--minutes", "10"]
    words += ["--output", f"{output.rstrip('/')}-finetuned"]
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
    words = ["prune", sampled.model, "--sparsity", "0.5", "--own-words", str(sampled.path)]
    words += ["--sequence-length", str(sampled.sequence_length), "--output", "pruned"]
    return [f"{name_of_model(Path(sampled.model))}, own words written", *laid_out(shown), _next(words)]


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


def open_standard_streams() -> None:
    """Open what the caller has closed onto nothing: the next file would get its number, and what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # takes the lowest number that is free
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def ignore_write_errors(name: Literal["stdout", "stderr"]) -> None:
    """From now on ignore write errors on this stream: it is closed, or its disk is full."""
    stream = getattr(sys, name)
    if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
        buffer = io.BufferedWriter(_Forgiving(stream.fileno(), "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True))


class _Forgiving(io.FileIO):
    @override
    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]
