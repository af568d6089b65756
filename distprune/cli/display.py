"""What a person sees: progress on standard error, tables on standard output; the first rank only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from distprune.checkpoint import InspectReport, import_extra
from distprune.cli.one_shot_figures import kinds_of, mean_error

__all__ = ["Display", "show_inspection"]

Progress = Callable[[int, int], None]

_WIDTH_OF_FILES = 200  # characters
_RANKS_SHOWN = 8


class Display:
    """Shows things on one rank, and nothing on the others."""

    def __init__(self, *, visible: bool) -> None:
        self._visible = visible

    def say(self, text: str) -> None:
        """Print one line to standard error."""
        if self._visible:
            sys.stderr.write(text + "\n")

    @contextmanager
    def progress(self, title: str, unit: str) -> Iterator[Progress]:
        """Yield a callback (done, total) behind a bar that is silent when standard error is no terminal."""
        tqdm = import_extra("tqdm", "hf").tqdm
        hidden = not self._visible or not sys.stderr.isatty()
        with tqdm(desc=title, unit=unit, unit_scale=unit == "bytes", disable=hidden, leave=False) as bar:

            def update(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield update

    @contextmanager
    def block_progress(self, first: int, total: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Yield a callback for the report of every block from ``first`` on, called as the block is done.

        On a terminal a bar with the time left and the error of the block just done; elsewhere, in the log of
        a job that takes hours, one line a block that says the same.
        """
        tqdm = import_extra("tqdm", "hf").tqdm
        hidden = not self._visible or not sys.stderr.isatty()
        started = time.perf_counter()
        bar = tqdm(desc="pruning", unit="block", initial=first, total=total, disable=hidden, leave=False, mininterval=0)
        with bar:

            def update(block: Mapping[str, Any]) -> None:
                error = mean_error(block)
                shown = "none" if error is None else f"{error:.4f}"
                bar.set_postfix_str(f"error {shown}", refresh=False)
                bar.update()
                if hidden:
                    num_done = block["index"] + 1
                    left = (time.perf_counter() - started) / (num_done - first) * (total - num_done)
                    self.say(
                        f"pruned {block['name']}, {num_done} of {total} blocks: relative error {shown}, "
                        f"{tqdm.format_interval(left)} left"
                    )

            yield update

    def summary(self, report: dict[str, Any]) -> None:
        """Print the summary of a finished job."""
        if not self._visible:
            return
        console, table = _console_and_table("pruned", ("", ""))
        pruning, seconds = report["pruning"], report["stage_seconds"]
        share = pruning["num_zeros"] / max(pruning["num_elements"], 1)
        chosen = pruning["pattern"] or f"amount {pruning['amount']}"
        rows = [
            ("model", report["model"]),
            ("output", report["arguments"]["output"]),
            ("method", ", ".join(str(word) for word in (pruning["method"], pruning["scope"], chosen) if word)),
            ("ranks", f"{report['num_ranks']} on {report['device']}"),
            ("parameters", f"{len(pruning['parameters'])} tensors, {pruning['num_elements']:,} weights"),
            ("zeros", f"{pruning['num_zeros']:,} ({share:.4%}), {pruning['num_pruned']:,} of them new"),
            ("communication", f"{pruning['num_rounds']} rounds, {pruning['num_bytes']:,} bytes a rank"),
            ("seconds", ", ".join(f"{stage} {value:.1f}" for stage, value in seconds.items())),
        ]
        if report["perplexity_before"] is not None:
            rows.append(("perplexity", f"{report['perplexity_before']:.2f} -> {report['perplexity_after']:.2f}"))
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def one_shot_summary(self, report: dict[str, Any]) -> None:
        """Print what a finished one-shot job did, block by block and kind by kind of linear map."""
        if not self._visible:
            return
        pruning, blocks = report["pruning"], report["pruning"]["blocks"]
        stages = list(blocks[0]["seconds"]) if blocks else []
        columns = ("block", "sparsity", "relative error", *(f"{stage} s" for stage in stages), "rounds", "MiB sent")
        console, table = _console_and_table(f"{pruning['method']}, {pruning['pattern']}", columns)
        for block in blocks:
            num_elements, num_zeros = (sum(m[key] for m in block["maps"]) for key in ("num_elements", "num_zeros"))
            table.add_row(
                block["name"],
                f"{num_zeros / max(num_elements, 1):.4%}",
                _range_of((mean_error(block),)),
                *(f"{block['seconds'][stage]:.2f}" for stage in stages),
                str(block["num_rounds"]),
                f"{block['num_bytes'] / 2**20:.1f}",
            )
            for kind in kinds_of(block):
                table.add_row(f"  {kind.name}", f"{kind.sparsity:.4%}", _range_of(kind.errors))
        table.add_section()
        table.add_row(
            "all",
            "",
            "",
            *(f"{sum(block['seconds'][stage] for block in blocks):.2f}" for stage in stages),
            str(sum(block["num_rounds"] for block in blocks)),
            f"{sum(block['num_bytes'] for block in blocks) / 2**20:.1f}",
        )
        console.print(table)
        peaks = sorted((peak / 2**20 for peak in pruning["peak_memory"]), reverse=True)
        by_rank = ", ".join(f"{peak:.0f}" for peak in peaks[:_RANKS_SHOWN]) + ("..." if peaks[_RANKS_SHOWN:] else "")
        lines = [
            f"model {report['model']}, output {report['arguments']['output']}",
            f"{report['num_ranks']} ranks on {report['device']}, {pruning['num_samples']} samples",
            "seconds: " + ", ".join(f"{stage} {value:.1f}" for stage, value in report["stage_seconds"].items()),
            f"peak memory of the ranks: {by_rank} MiB",
        ]
        if pruning["resumed_at"]:
            lines.append(f"resumed at block {pruning['resumed_at']}: seconds and memory are of this run alone")
        if report["perplexity_before"] is not None:
            lines.append(f"perplexity {report['perplexity_before']:.2f} -> {report['perplexity_after']:.2f}")
        for line in lines:
            console.print(line)


def _range_of(errors: tuple[float | None, ...]) -> str:
    known = [error for error in errors if error is not None]
    if not known:
        return ""
    low, high = f"{min(known):.4f}", f"{max(known):.4f}"
    return low if low == high else f"{low} to {high}"


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
        table.add_column(column, justify="right" if column in ("zeros", "sparsity") else "left", overflow="fold")
    return console, table
