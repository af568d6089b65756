"""Outputs of jobs side by side, from their report.json: a table, and a picture of perplexity against sparsity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from typing_extensions import override

from distprune.checkpoint.hf_directory import CONFIG_NAME
from distprune.checkpoint.inspect import inspect_directory
from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.stored_slices import Progress
from distprune.figure import check_picture, new_figure, write_png
from distprune.formatting import count, one_line, printable, share
from distprune.jobs.run import REPORT_NAME

_NO_FIGURE = "-"
_WIDTH = 80  # columns
_LOGARITHMIC_FROM = 10.0  # times the lowest perplexity
# A text: the path of its file, and how many tokens of it were run, in windows of how many.
_Text: TypeAlias = tuple[str, int, int]


@dataclass(frozen=True)
class ComparedOutput:
    """What the report of one output says; or, where there is none, the weights: then ``seconds`` are None.

    ``sparsity``: the share of zeros of the prunable weights; ``removed``: the share of parameters that a smaller model
    has lost. ``before``, ``after``: perplexities by text. ``model``: what the job began with.
    """

    path: Path
    model: str
    method: str
    sparsity: float | None
    removed: float | None
    num_parameters: int | None
    seconds: float | None
    before: Mapping[_Text, float]
    after: Mapping[_Text, float]
    is_trained: bool

    @property
    def share(self) -> float | None:
        """Zeros among the prunable weights, or of a smaller model what is gone of all."""
        return self.sparsity if self.removed is None else self.removed

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{self.path}, {_percent(self.share)} by {self.method}")


@dataclass(frozen=True)
class Comparison:
    """Outputs side by side. ``print`` shows a table; :meth:`draw` a picture."""

    outputs: tuple[ComparedOutput, ...]

    @property
    def texts(self) -> list[_Text]:
        """All texts that outputs were evaluated on, in their order."""
        return list(dict.fromkeys(text for of in self.outputs for text in of.after))

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{len(self.outputs)} outputs on {len(self.texts)} texts")

    @override
    def __str__(self) -> str:
        """Return the table, with a row for each model that was pruned or made smaller, as it was before.

        A table wider than 80 columns is turned: outputs stand beside each other, as many as there is room for.
        """
        texts, names = self.texts, self._names()
        columns = ["output", "sparsity", "parameters", *(names[text] for text in texts), "seconds", "method"]
        table = [[printable(cell) for cell in row] for row in (columns, *self._rows())]
        lines = _aligned(table, [column in ("output", "method") for column in columns])
        if max(map(len, lines)) > _WIDTH:
            lines = _turned(table)
        under = ["perplexity by text"] if texts else ["no perplexities: run the jobs with --eval"]
        if any(of.removed is not None for of in self.outputs):
            under.append("sparsity of a smaller model: the share of all parameters that is gone")
        return "\n".join([*lines, *(f"({said})" for said in under)])

    def _rows(self) -> Iterator[list[str]]:
        texts = self.texts
        for model, before in self._before().items():
            yield [f"{Path(model).name}, before", *[_NO_FIGURE] * 2, *_perplexities(before, texts), *[_NO_FIGURE] * 2]
        for of in self.outputs:
            parameters = _NO_FIGURE if of.num_parameters is None else count(of.num_parameters)
            seconds = _NO_FIGURE if of.seconds is None else f"{of.seconds:.1f}"
            yield [str(of.path), _percent(of.share), parameters, *_perplexities(of.after, texts), seconds, of.method]

    def _before(self) -> dict[str, dict[_Text, float]]:
        """Return the perplexities before of each model that was not trained."""
        found: dict[str, dict[_Text, float]] = {}
        for of in self.outputs:
            if of.before and not of.is_trained:
                found.setdefault(of.model, {}).update(of.before)
        return found

    def _names(self) -> dict[_Text, str]:
        """Return what each text is called: by its file alone, where that tells them apart."""
        texts = self.texts
        files, paths = ([of(text) for text in texts] for of in (lambda text: Path(text[0]).name, lambda text: text[0]))
        named = {}
        for text, file, path in zip(texts, files, paths, strict=True):
            shown = file if len({of[0] for of in texts if Path(of[0]).name == file}) == 1 else path
            is_once = paths.count(path) == 1
            named[text] = shown if is_once else f"{shown} ({text[1]:,} tokens in windows of {text[2]:,})"
        return named

    def draw(self, path: str | Path | None = None, *, overwrite: bool = False) -> Any:
        """Return a matplotlib figure of perplexity against sparsity, a panel for each text.

        It is written to ``path``, a PNG, if that is given; ``overwrite``: also over a file.

        Raises:
            ImportError: the extra ``plot`` is not installed.
            ValueError: the file is no ``.png``, is a link, or lies in a model's directory; or no output was evaluated.
            FileExistsError: the file is there, and ``overwrite`` is off.
            OSError: it cannot be written.
        """
        if path is not None:
            check_picture(path, overwrite=overwrite)
        texts, names = self.texts, self._names()
        if not texts:
            raise ValueError("there is no perplexity to draw: run the jobs with --eval")
        figure = new_figure(5.0 * min(len(texts), 3) + 2.0, 4.0 * -(-len(texts) // 3) + 0.5)
        ticks = import_extra("matplotlib.ticker", "plot")
        panels = figure.subplots(-(-len(texts) // 3), min(len(texts), 3), squeeze=False).flatten()
        methods = list(dict.fromkeys(of.method for of in self.outputs))
        for panel, text in zip(panels, texts, strict=False):
            for i, method in enumerate(methods):
                of_method = [of for of in self.outputs if of.method == method and text in of.after]
                if not of_method:
                    continue
                points = sorted((of.share, of.after[text]) for of in of_method if of.share is not None)
                style = {"color": f"C{i % 10}", "marker": "os^Dv<>"[i % 7], "linestyle": "--" if i >= 10 else "-"}
                panel.plot([x for x, _ in points], [y for _, y in points], label=method, **style)
            for before in self._before().values():
                if text in before:
                    panel.axhline(before[text], color="0.4", linestyle=":", label="before")
            panel.set_title(f"Perplexity on {names[text]}", fontsize="medium")
            panel.set_xlabel(self._axis())
            panel.set_ylabel("perplexity (lower is better)")
            panel.xaxis.set_major_formatter(ticks.PercentFormatter(xmax=1.0))
            panel.grid(alpha=0.3)
            perplexities = [of.after[text] for of in self.outputs if text in of.after]
            if max(perplexities) > _LOGARITHMIC_FROM * min(perplexities):
                panel.set_yscale("log")
        for panel in panels[len(texts) :]:
            panel.remove()
        labels = {
            label: handle
            for panel in panels[: len(texts)]
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", fontsize="small", ncols=2)
        if path is not None:
            write_png(figure, path, overwrite=overwrite)
        return figure

    def _axis(self) -> str:
        has_smaller = any(of.removed is not None for of in self.outputs)
        has_zeros = any(of.removed is None for of in self.outputs)
        said = (["zeros, share of the prunable weights"] if has_zeros else []) + (
            ["gone, share of all parameters"] if has_smaller else []
        )
        return "; or ".join(said)


def compare_outputs(outputs: Sequence[str | Path], *, progress: Progress = None) -> Comparison:
    """Return what the reports of ``outputs``, directories that jobs have written, say side by side. Local.

    Of a model directory without a report, such as :func:`distprune.save` writes, the weights are read.

    Args:
        progress: called with (bytes read so far, bytes to read) of such a directory.

    Raises:
        FileNotFoundError: some hold neither a report nor a model; the message names them.
        ValueError: a report, or a model without one, is damaged.
    """
    paths = [*map(Path, outputs)]
    if missing := [str(path) for path in paths if not any((path / of).is_file() for of in (REPORT_NAME, CONFIG_NAME))]:
        raise FileNotFoundError(
            f"{', '.join(missing)}: no output, without a {REPORT_NAME} or a {CONFIG_NAME}; name directories of models"
        )
    return Comparison(
        tuple(_read(path) if (path / REPORT_NAME).is_file() else _inspected(path, progress) for path in paths)
    )


def _inspected(path: Path, progress: Progress) -> ComparedOutput:
    report = inspect_directory(path, progress=progress)
    num_zeros, num_prunable, num_parameters = report.prunable_zeros or (0, 0, report.num_elements)
    return ComparedOutput(
        path=path,
        model=str(path),
        method=_NO_FIGURE,
        sparsity=num_zeros / num_prunable if num_prunable else report.sparsity,
        removed=None,
        num_parameters=num_parameters,
        seconds=None,
        before={},
        after={},
        is_trained=False,
    )


def _read(path: Path) -> ComparedOutput:
    try:
        report = json.loads((path / REPORT_NAME).read_text(encoding="utf-8"))
        asked, zeros = report["arguments"], report.get("zeros")
        removal, training, pruning = (report.get(key) for key in ("removal", "training", "pruning"))
        if removal is not None:
            method, num_parameters = f"shrink by {removal['method']}", removal["num_parameters"]
        else:
            method = str(training["method"]) if pruning is None else _method(pruning, str(asked["pattern"]))
            num_parameters = None if zeros is None else zeros["num_parameters"]
        tokens, length = int(asked["evaluation_tokens"]), int(asked["evaluation_length"])
        texts = [
            {(file, tokens, length): float(of) for file, of in report[f"perplexity_{when}"].items()}
            for when in ("before", "after")
        ]
        return ComparedOutput(
            path=path,
            model=str(report["model"]),
            method=method,
            sparsity=None if zeros is None else float(zeros["sparsity"]),
            removed=None if removal is None else 1 - removal["num_parameters"] / removal["num_parameters_before"],
            num_parameters=None if num_parameters is None else int(num_parameters),
            seconds=float(report["stage_seconds"]["total"]),
            before=texts[0],
            after=texts[1],
            is_trained=training is not None,
        )
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path / REPORT_NAME} is no report of a job, or damaged: {error!r}") from error


def _aligned(table: Sequence[Sequence[str]], is_left: Sequence[bool]) -> list[str]:
    """Return the lines of a ``table``, whose columns stand on the left or the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in table
    ]


def _turned(table: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a ``table`` with rows as columns, below each other where they are too wide together."""
    names, *outputs = table
    lines: list[str] = []
    while outputs:
        parts = {
            num: _aligned([*zip(names, *outputs[:num], strict=True)], [True, *[False] * num])
            for num in range(1, len(outputs) + 1)
        }
        num = max((num for num, part in parts.items() if max(map(len, part)) <= _WIDTH), default=1)
        lines += ["", *parts[num]] if lines else parts[num]
        outputs = outputs[num:]
    return lines


def _method(pruning: Mapping[str, Any], pattern: str) -> str:
    method = str(pruning["score"] if "score" in pruning else pruning["method"])
    return method if pattern.lower().startswith("unstructured") else f"{method}, {pattern}"


def _percent(part: float | None) -> str:
    return _NO_FIGURE if part is None else share(part)


def _perplexities(found: Mapping[_Text, float], texts: Sequence[_Text]) -> list[str]:
    return [f"{found[text]:.2f}" if text in found else _NO_FIGURE for text in texts]
