"""What a person sees: progress on standard error, tables on standard output; the first rank only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from distprune.checkpoint import InspectReport, import_extra

__all__ = ["Display", "show_inspection"]

Progress = Callable[[int, int], None]

_WIDTH_OF_FILES = 200  # characters


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

    def summary(self, report: dict[str, Any]) -> None:
        """Print the summary of a finished job."""
        if not self._visible:
            return
        console, table = _console_and_table("pruned", ("", ""))
        pruning, seconds = report["pruning"], report["stage_seconds"]
        share = pruning["num_zeros"] / max(pruning["num_elements"], 1)
        rows = [
            ("model", report["model"]),
            ("output", report["arguments"]["output"]),
            ("method", f"{pruning['method']}, {pruning['scope']}, amount {pruning['amount']}"),
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
        """Print what a finished one-shot job did, block by block."""
        if not self._visible:
            return
        pruning, seconds = report["pruning"], report["stage_seconds"]
        stages = list(pruning["blocks"][0]["seconds"]) if pruning["blocks"] else []
        columns = ("block", "sparsity", "relative error", *(f"{stage} s" for stage in stages), "rounds", "MiB")
        console, table = _console_and_table(f"{pruning['method']}, {pruning['pattern']}", columns)
        for block in pruning["blocks"]:
            num_elements = sum(of_map["num_elements"] for of_map in block["maps"])
            num_zeros = sum(of_map["num_zeros"] for of_map in block["maps"])
            errors = [of_map["relative_error"] for of_map in block["maps"] if of_map["relative_error"] is not None]
            table.add_row(
                block["name"],
                f"{num_zeros / max(num_elements, 1):.4%}",
                f"{min(errors):.3f} to {max(errors):.3f}" if errors else "",
                *(f"{block['seconds'][stage]:.2f}" for stage in stages),
                str(block["num_rounds"]),
                f"{block['num_bytes'] / 2**20:.1f}",
            )
        console.print(table)
        memory = max(pruning["peak_memory"]) / 2**20
        lines = [
            f"model {report['model']}, output {report['arguments']['output']}",
            f"{report['num_ranks']} ranks on {report['device']}, {pruning['num_samples']} samples",
            f"{seconds['total']:.1f} s, peak memory {memory:.0f} MiB a rank",
        ]
        if report["perplexity_before"] is not None:
            lines.append(f"perplexity {report['perplexity_before']:.2f} -> {report['perplexity_after']:.2f}")
        for line in lines:
            console.print(line)


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
