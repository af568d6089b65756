"""What a person sees: progress on standard error, a summary on standard output; the first rank only."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from typing_extensions import override

from distprune.checkpoint.inspect import InspectReport
from distprune.checkpoint.optional_packages import import_extra
from distprune.cli.heartbeat import Heartbeat
from distprune.cli.summary import inspection_lines, job_lines, plan_lines, sample_lines
from distprune.cli.tables import show_inspection, show_job
from distprune.formatting import printable
from distprune.jobs import JobReport, PlannedWalk, Sampled, Watcher, Work
from distprune.jobs.figures import mean_error

_INTERVAL = 30.0  # seconds in which a log hears something


class Display(Watcher):
    """Shows things on one rank, and nothing on the others. ``verbose``: all of a report, before its summary.

    Inside a ``with`` something is said every ``interval`` seconds; on a terminal where no bar moves, in a log always.
    """

    def __init__(self, *, visible: bool, verbose: bool = False, interval: float = _INTERVAL) -> None:
        self._visible, self._verbose = visible, verbose
        self._has_bars = visible and sys.stderr.isatty()
        self._tqdm = import_extra("tqdm", "hf").tqdm
        self._bar: Any = None
        self._block_seconds: list[float] = []
        self._heartbeat = Heartbeat(self._write, interval)

    @property
    def stage(self) -> str:
        """What the job does now."""
        return self._heartbeat.stage

    def __enter__(self) -> Self:
        if self._visible:
            self._heartbeat.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._heartbeat.stop()
        self.close()

    @override
    def say(self, text: str) -> None:
        if self._visible:
            self._write(text)
            self._heartbeat.said()

    def _write(self, text: str) -> None:
        text = printable(text)
        if self._bar is None:
            sys.stderr.write(text + "\n")
        else:
            self._tqdm.write(text, file=sys.stderr)  # above the bar

    @override
    def begin(self, stage: str) -> None:
        self._heartbeat.begin(stage)

    @override
    def progress(self, stage: str, unit: str, done: int, total: int) -> None:
        """Draw a bar, where standard error is a terminal."""
        if self._has_bars:
            bar = self._bar_of(stage, unit=unit, unit_scale=unit == "bytes", total=total)
            bar.update(done - bar.n)
            self._heartbeat.said()
        shown = [f"{of / 2**20:,.0f}" if unit == "bytes" else f"{of:,}" for of in (done, total)]
        self._heartbeat.at(f"{' of '.join(shown)} {'MiB' if unit == 'bytes' else unit}", stage)

    @override
    def block(self, report: Mapping[str, Any], num_blocks: int) -> None:
        """Show the time left and the error of the block just done: in a bar, or in a log as one line a block."""
        if not self._visible:
            return
        error, num_done = mean_error(report), report["index"] + 1
        shown = "none" if error is None else f"{error:.4f}"
        self._block_seconds.append(sum(report["seconds"].values()))
        self._heartbeat.at(f"{num_done} of {num_blocks} blocks")
        if self._has_bars:
            bar = self._bar_of("pruning", unit="block", initial=num_done - 1, total=num_blocks, mininterval=0)
            bar.set_postfix_str(f"error {shown}", refresh=False)
            bar.update(num_done - bar.n)
            self._heartbeat.said()
        else:
            left = sum(self._block_seconds) / len(self._block_seconds) * (num_blocks - num_done)
            self.say(
                f"pruned {report['name']}, {num_done} of {num_blocks} blocks: relative error {shown}, "
                f"{self._tqdm.format_interval(left)} left"
            )

    def _bar_of(self, stage: str, **settings: Any) -> Any:
        """Return the bar of a stage; that of the stage before goes away."""
        if self._bar is None or self._bar.desc != stage:
            self.close()
            self._bar = self._tqdm(desc=stage, leave=False, **settings)
        return self._bar

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def summary(self, report: JobReport[Work]) -> None:
        """Print what a finished job did."""
        if self._visible:
            if self._verbose:
                show_job(report)
            _print(job_lines(report))

    def sampled(self, report: Sampled, model: str) -> None:
        """Print what was written."""
        if self._visible:
            _print(sample_lines(report, model))

    def plan(self, walk: PlannedWalk) -> None:
        """Print what a job would take of each rank."""
        if self._visible:
            _print(plan_lines(walk))

    def inspection(self, report: InspectReport) -> None:
        """Print how sparse a directory is."""
        if self._verbose:
            show_inspection(report)
        _print(inspection_lines(report))


def _print(lines: Sequence[str]) -> None:
    sys.stdout.write(printable("\n".join(lines)) + "\n")
