"""What a person sees: progress on standard error, tables on standard output; the first rank only."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from distprune.checkpoint import InspectReport, import_extra
from distprune.jobs import JobReport, PlannedWalk, PrunedBlocks, Sampled, SmallerModel, Trained, Walked, Watcher, Work
from distprune.jobs.figures import Kind, evaluated, kinds_of, mean_error, range_of, work_rows
from distprune.oneshot.room import gibibytes
from distprune.oneshot.walk_costs import PartCost
from distprune.pruning import PruneReport

_WIDTH_OF_FILES = 200  # characters
_RANKS_SHOWN = 8
_NUMBERS = {"zeros", "sparsity", "device MiB", "host MiB", "sent MiB", "arriving MiB", "seconds"}  # columns


class Display(Watcher):
    """Shows things on one rank, and nothing on the others."""

    def __init__(self, *, visible: bool) -> None:
        self._visible = visible
        self._has_bars = visible and sys.stderr.isatty()
        self._tqdm = import_extra("tqdm", "hf").tqdm
        self._bar: Any = None
        self._block_seconds: list[float] = []

    @override
    def say(self, text: str) -> None:
        if self._visible:
            sys.stderr.write(text + "\n")

    @override
    def progress(self, stage: str, unit: str, done: int, total: int) -> None:
        """Draw a bar, where standard error is a terminal."""
        if self._has_bars:
            bar = self._bar_of(stage, unit=unit, unit_scale=unit == "bytes", total=total)
            bar.update(done - bar.n)

    @override
    def block(self, report: Mapping[str, Any], num_blocks: int) -> None:
        """Show the time left and the error of the block just done: in a bar, or in a log as one line a block."""
        if not self._visible:
            return
        error, num_done = mean_error(report), report["index"] + 1
        shown = "none" if error is None else f"{error:.4f}"
        self._block_seconds.append(sum(report["seconds"].values()))
        if self._has_bars:
            bar = self._bar_of("pruning", unit="block", initial=num_done - 1, total=num_blocks, mininterval=0)
            bar.set_postfix_str(f"error {shown}", refresh=False)
            bar.update(num_done - bar.n)
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
        """Print what a finished job did; a walk block by block and kind by kind of linear layer."""
        self.close()
        if not self._visible:
            return
        if isinstance(report.work, Walked):
            _show_blocks(report.work.blocks)
        rows = [
            ("model", str(report.model)),
            ("output", report.job.output),
            ("ranks", f"{report.num_ranks} on {report.device}"),
            *work_rows(report),
            *_run_rows(report.work),
            ("seconds", ", ".join(f"{stage} {value:.1f}" for stage, value in report.seconds.items())),
            *((what, f"{before} -> {after}") for what, before, after in evaluated(report)),
        ]
        done = {SmallerModel: "made smaller", Trained: "fine-tuned"}.get(type(report.work), "pruned")
        console, table = _console_and_table(done, ("", ""))
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def sampled(self, report: Sampled) -> None:
        """Print what was written."""
        self.close()
        num, length, seconds = report.num_samples, report.sequence_length, report.seconds
        self.say(f"{report.path}: {num} windows of {length} tokens, {num * length / seconds:,.0f} a second")

    def plan(self, walk: PlannedWalk) -> None:
        """Print what a job would take of each rank."""
        self.close()
        if not self._visible:
            return
        asked, most = walk.asked, walk.plan.most
        columns = ("of a rank", "device MiB", "host MiB", "sent MiB", "arriving MiB", "seconds")
        console, table = _console_and_table(f"{walk.model}: planned, nothing was run", columns)
        for name, cost in walk.plan.parts.items():
            table.add_row(name, *_figures(cost))
        table.add_section()
        table.add_row("at most at a time; all traffic", *_figures(most))
        console.print(table)
        rows = [
            ("ranks", f"{asked.num_ranks}, on {walk.where} each"),
            ("samples", f"{asked.num_samples} of {asked.length} tokens"),
            ("own words", f"{walk.num_written} windows, written in {gibibytes(walk.writing)} beside the weights"),
            ("experts at a time", f"{gibibytes(asked.expert_memory)} of their sums"),
            ("memory", "unknown" if walk.room is None else f"{gibibytes(walk.room)} on {walk.where}"),
            ("fits", "unknown" if walk.room is None else "yes" if walk.fits else "no"),
        ]
        console, table = _console_and_table("", ("", ""))
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _figures(cost: PartCost) -> Iterator[str]:
    """Yield the figures of a plan's row: memory and traffic in MiB, seconds."""
    *sizes, seconds = vars(cost).values()
    yield from (f"{size / 2**20:,.0f}" if size >= 2**20 or not size else "< 1" for size in sizes)
    yield f"{seconds:,.1f}"


def _run_rows(work: Work) -> Iterator[tuple[str, str]]:
    """Yield what it took, and what it came to, of this run alone."""
    if isinstance(work, PruneReport):
        yield "parameters", f"{len(work.parameters)} tensors, {work.num_pruned:,} weights are zero now that were not"
        yield "communication", f"{work.num_rounds} rounds, {work.num_bytes:,} bytes a rank"
        return
    if isinstance(work, Trained):
        yield "training", f"{work.num_steps} steps, {work.num_tokens:,} tokens, {work.seconds:.0f} s"
        yield "loss", f"{work.losses[0]:.4f} -> {work.losses[-1]:.4f}"
        resumed = f"after step {work.resumed_at}"
    else:
        if isinstance(work, PrunedBlocks):
            yield "allocation", work.allocation
        peaks = sorted((peak / 2**20 for peak in work.walk.peak_memory), reverse=True)
        by_rank = ", ".join(f"{peak:.0f}" for peak in peaks[:_RANKS_SHOWN]) + ("..." if peaks[_RANKS_SHOWN:] else "")
        yield "peak memory", f"{by_rank} MiB"
        resumed = f"at block {work.resumed_at}: seconds and memory are of this run alone"
    if work.resumed_at:
        yield "resumed", resumed


def _show_blocks(blocks: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of all blocks and of the kinds of linear maps in each."""
    stages = list(blocks[0]["seconds"]) if blocks else []

    def costs(of: Sequence[Mapping[str, Any]]) -> list[str]:
        return [
            *(f"{sum(block['seconds'][stage] for block in of):.2f}" for stage in stages),
            str(sum(block["num_rounds"] for block in of)),
            f"{sum(block['num_bytes'] for block in of) / 2**20:.1f}",
        ]

    columns = ("block", "sparsity", "relative error", *(f"{stage} s" for stage in stages), "rounds", "MiB sent")
    console, table = _console_and_table("blocks", columns)
    for block in blocks:
        whole = Kind(block["name"], block["layers"])
        error = "" if whole.error is None else f"{whole.error:.4f}"
        table.add_row(whole.name, f"{whole.sparsity:.4%}", error, *costs([block]))
        for kind in kinds_of(block):
            table.add_row(f"  {kind.name}", f"{kind.sparsity:.4%}", range_of(kind.errors, ".4f"))
    table.add_section()
    table.add_row("all", "", "", *costs(blocks))
    console.print(table)


def show_inspection(report: InspectReport) -> None:
    """Print a table of all tensors and the totals."""
    columns = ("tensor", "shape", "dtype", "zeros", "sparsity", "N:M")
    console, table = _console_and_table(report.path, columns)
    for tensor in report.tensors:
        shape = "x".join(map(str, tensor.shape))
        zeros, sparsity = f"{tensor.num_zeros:,}", f"{tensor.sparsity:.4%}"
        table.add_row(tensor.name, shape, tensor.dtype, zeros, sparsity, " ".join(tensor.patterns))
    table.add_section()
    table.add_row("all", "", "", f"{report.num_zeros:,}", f"{report.sparsity:.4%}", "")
    console.print(table)


def _console_and_table(title: str, columns: tuple[str, ...]) -> tuple[Any, Any]:
    # In a file or a pipe there is no width to fit; on a screen names are folded, never cut.
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    console = import_extra("rich.console", "hf").Console(highlight=False, width=width)
    table = import_extra("rich.table", "hf").Table(title=title, show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    return console, table
