"""Whole tables, for those who ask for them: every parameter, block, step or tensor, and the figures of a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distprune.checkpoint.inspect import InspectReport
from distprune.checkpoint.optional_packages import import_extra
from distprune.formatting import printable
from distprune.jobs import JobReport, Trained, Walked, Work
from distprune.jobs.figures import Kind, kinds_of, range_of, trial_rows
from distprune.jobs.report import SmallerModel
from distprune.pruning.report import PruneReport

_WIDTH_OF_FILES = 200  # characters
_NUMBERS = {"zeros", "sparsity", "device MiB", "host MiB", "sent MiB", "arriving MiB", "seconds"}  # columns


def show_job(report: JobReport[Work]) -> None:
    """Print all that a job did, parameter by parameter, block by block or step by step."""
    work = report.work
    if isinstance(work, Walked):
        _show_blocks(work.blocks)
        if isinstance(work, SmallerModel) and work.trials:
            _show("trials", ("", ""), trial_rows(work))
    elif isinstance(work, Trained):
        losses = enumerate(work.losses, start=1)
        _show("losses", ("step", "loss"), ((str(step), f"{loss:.6g}") for step, loss in losses))
    elif isinstance(work, PruneReport):
        rows = ((of.name, f"{of.num_zeros:,}", f"{of.sparsity:.4%}", _or_none(of.threshold)) for of in work.parameters)
        _show("parameters", ("parameter", "zeros", "sparsity", "threshold"), rows)
    _show("seconds", ("stage", "seconds"), ((stage, f"{took:.2f}") for stage, took in report.seconds.items()))
    peaks = enumerate(report.peak_memory)
    _show("peak memory", ("rank", "host MiB"), ((str(rank), f"{peak / 2**20:,.0f}") for rank, peak in peaks))


def show_inspection(report: InspectReport) -> None:
    """Print a table of all tensors and the totals."""
    columns = ("tensor", "shape", "dtype", "zeros", "sparsity", "N:M")
    console, table = _console_and_table(report.path, columns)
    for tensor in report.tensors:
        shape = "x".join(map(str, tensor.shape))
        zeros, sparsity = f"{tensor.num_zeros:,}", f"{tensor.sparsity:.4%}"
        _add(table, tensor.name, shape, tensor.dtype, zeros, sparsity, " ".join(tensor.patterns))
    table.add_section()
    _add(table, "all", "", "", f"{report.num_zeros:,}", f"{report.sparsity:.4%}", "")
    console.print(table)


def _or_none(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _show_blocks(blocks: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of all blocks and of the kinds of linear layers in each."""
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
        _add(table, whole.name, f"{whole.sparsity:.4%}", error, *costs([block]))
        for kind in kinds_of(block):
            _add(table, f"  {kind.name}", f"{kind.sparsity:.4%}", range_of(kind.errors, ".4f"))
    table.add_section()
    _add(table, "all", "", "", *costs(blocks))
    console.print(table)


def _show(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    console, table = _console_and_table(title, columns)
    for row in rows:
        _add(table, *row)
    console.print(table)


def _add(table: Any, *cells: str) -> None:
    table.add_row(*map(printable, cells))


def _console_and_table(title: str, columns: tuple[str, ...]) -> tuple[Any, Any]:
    # In a file or a pipe there is no width to fit; on a screen names are folded, never cut.
    width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
    console = import_extra("rich.console", "hf").Console(highlight=False, markup=False, width=width)
    table = import_extra("rich.table", "hf").Table(title=printable(title), show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    return console, table
