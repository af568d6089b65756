"""Outputs of jobs side by side, from their report.json: in words, and a picture of perplexity against sparsity."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from distprune.checkpoint.hf_directory import CONFIG_NAME
from distprune.checkpoint.inspect import inspect_directory
from distprune.checkpoint.stored_slices import Progress
from distprune.figure import new_figure, saved
from distprune.formatting import one_line, printable, share
from distprune.jobs.options import REPORT_NAME
from distprune.jobs.report import Row, inspection_rows, perplexities, rows

_LOGARITHMIC_FROM = 10.0  # times the lowest perplexity


@dataclass(frozen=True)
class ComparedOutput:
    """What the report of one output says in ``rows``; or, where there is none, the weights.

    ``share``: of zeros among the prunable weights, or of a smaller model what is gone of all parameters.
    ``perplexity``: before and after, by text. ``is_trained``: before, it was no dense model.
    """

    path: Path
    rows: Sequence[Row]
    method: str
    share: float
    perplexity: Mapping[str, tuple[float, float]]
    is_trained: bool = False

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{self.path}, {share(self.share)} by {self.method}")


@dataclass(frozen=True)
class Comparison:
    """Outputs side by side. ``print`` shows each figure of all of them; :meth:`draw` a picture."""

    outputs: tuple[ComparedOutput, ...]

    @property
    def texts(self) -> list[str]:
        """All texts that outputs were evaluated on, in their order."""
        return list(dict.fromkeys(text for output in self.outputs for text in output.perplexity))

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{len(self.outputs)} outputs on {len(self.texts)} texts")

    @override
    def __str__(self) -> str:
        """Return what reports say, figure by figure, with a line for each output that has it."""
        width = max((len(str(output.path)) for output in self.outputs), default=0)
        by_name: dict[str, list[str]] = {}
        for output in self.outputs:
            for name, text in output.rows:
                by_name.setdefault(name, [name]).append(f"  {output.path!s:<{width}}  {text}")
        lines = [line for listed in by_name.values() for line in listed]
        return printable("\n".join(lines if self.texts else [*lines, "(no perplexities: run the jobs with --eval)"]))

    def draw(self, path: str | Path | None = None, *, overwrite: bool = False) -> Any:
        """Return a matplotlib figure of perplexity against sparsity, a panel for each text.

        It is written to ``path``, a PNG, if that is given; ``overwrite``: also over a file.

        Raises:
            ImportError: the extra ``plot`` is not installed.
            ValueError: the file is no ``.png``, is a link, or lies in a model's directory; or no output was evaluated.
            FileExistsError: the file is there, and ``overwrite`` is off.
            OSError: it cannot be written.
        """
        if not (texts := self.texts):
            raise ValueError("there is no perplexity to draw: run the jobs with --eval")
        figure = new_figure(6.0, 4.5 * len(texts))
        for panel, text in zip(figure.subplots(len(texts), squeeze=False)[:, 0], texts, strict=True):
            outputs = [output for output in self.outputs if text in output.perplexity]
            for method in dict.fromkeys(output.method for output in outputs):
                points = sorted((one.share, one.perplexity[text][1]) for one in outputs if one.method == method)
                panel.plot(*zip(*points, strict=True), label=method, marker="o")
            for before in {output.perplexity[text][0] for output in outputs if not output.is_trained}:
                panel.axhline(before, color="0.4", linestyle=":", label="before")
            after = [output.perplexity[text][1] for output in outputs]
            panel.set(
                xlabel="share of zeros of the prunable weights, or what is gone of all parameters",
                ylabel="perplexity (lower is better)",
                yscale="log" if max(after) > _LOGARITHMIC_FROM * min(after) else "linear",
            )
            panel.set_title(f"Perplexity on {text}", fontsize="medium")
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
        return saved(figure, path, overwrite=overwrite)


def compare_outputs(outputs: Sequence[str | Path], *, progress: Progress = None) -> Comparison:
    """Return what the reports of ``outputs``, directories that jobs have written, say side by side. Local.

    Of a model directory without a report, such as :func:`distprune.save` writes, the weights are read.

    Args:
        progress: called with (bytes read so far, bytes to read) of such a directory.

    Raises:
        FileNotFoundError: some hold neither a report nor a model; the message names them.
        ValueError: a report, or a model without one, is damaged.
    """
    paths = [Path(os.path.expanduser(path)) for path in outputs]
    files = (REPORT_NAME, CONFIG_NAME)
    if missing := [str(path) for path in paths if not any((path / name).is_file() for name in files)]:
        raise FileNotFoundError(
            f"{', '.join(missing)}: no output, without a {REPORT_NAME} or a {CONFIG_NAME}; name directories of models"
        )
    return Comparison(tuple(_read(path, progress) for path in paths))


def _read(path: Path, progress: Progress) -> ComparedOutput:
    if (path / REPORT_NAME).is_file():
        return _of_report(path)
    report = inspect_directory(path, progress=progress)
    num_zeros, num_prunable, _ = report.prunable_zeros or (0, 0, None)
    part = num_zeros / num_prunable if num_prunable else report.sparsity
    return ComparedOutput(path, inspection_rows(report), "no job", part, {})


def _of_report(path: Path) -> ComparedOutput:
    try:
        report = json.loads((path / REPORT_NAME).read_text(encoding="utf-8"))
        shown, removal = rows(report, in_full=True), report.get("removal")
        if removal is not None:
            method = f"shrink by {removal['method']}"
            part = 1 - removal["num_parameters"] / removal["num_parameters_before"]
        else:
            method, part = dict(shown)["method"], float(report["zeros"]["sparsity"])
            pattern = str(report["arguments"].get("pattern", "unstructured"))
            if not pattern.lower().startswith("unstructured"):
                method = f"{method}, {pattern}"
        texts = perplexities(report, in_full=True)
        return ComparedOutput(path, shown, method, part, texts, is_trained="training" in report)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path / REPORT_NAME} is no report of a job, or damaged: {error!r}") from error
