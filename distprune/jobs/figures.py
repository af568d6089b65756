"""What a person reads off a report: rows of words, and figures by block and by kind of linear map.

Noun: a *kind* is the linear maps of a block whose names differ in numbers alone: one projection, or the
same projection of all experts, which are too many to be shown one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distprune.calibration.own_words import SELF
from distprune.checkpoint.inspect import TensorReport
from distprune.formatting import count, share
from distprune.jobs.report import JobReport, SmallerModel, Trained, Walked, Work
from distprune.patterns.as_pattern import as_pattern
from distprune.pruning.report import PruneReport
from distprune.removal.choose_units import refit_of_units

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a dotted name


@dataclass(frozen=True)
class Kind:
    """One kind of linear map in one block, with what the report has on its maps."""

    name: str
    layers: Sequence[Mapping[str, Any]]

    @property
    def sparsity(self) -> float:
        num_zeros = sum(int(of_layer["num_zeros"]) for of_layer in self.layers)
        return num_zeros / max(sum(int(of_layer["num_elements"]) for of_layer in self.layers), 1)

    @property
    def errors(self) -> tuple[float, ...]:
        """The relative errors, of the maps that have one."""
        return tuple(of_layer["relative_error"] for of_layer in self.layers if of_layer["relative_error"] is not None)

    @property
    def error(self) -> float | None:
        """The mean relative error."""
        return sum(self.errors) / len(self.errors) if self.errors else None


def kinds_of(block: Mapping[str, Any]) -> list[Kind]:
    """Return the kinds of a block as its report's ``to_dict`` has it, in the order of its maps."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for of_layer in block["layers"]:
        name = _NUMBER.sub("*", str(of_layer["name"]).removeprefix(f"{block['name']}."))
        by_name.setdefault(name, []).append(of_layer)
    return [Kind(name, layers) for name, layers in by_name.items()]


def by_kind(blocks: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Kind]]:
    """Return every kind of linear map over all blocks, by the number of the block."""
    found: dict[str, dict[int, Kind]] = {}
    for block in blocks:
        for kind in kinds_of(block):
            found.setdefault(kind.name, {})[int(block["index"])] = kind
    return found


def kinds_of_tensors(tensors: Sequence[TensorReport]) -> dict[str, list[TensorReport]]:
    """Return the tensors whose names differ in numbers alone, by their name with ``*`` for numbers, in order."""
    kinds: dict[str, list[TensorReport]] = {}
    for tensor in tensors:
        kinds.setdefault(_NUMBER.sub("*", tensor.name), []).append(tensor)
    return kinds


def range_of(values: Sequence[float], shape: str) -> str:
    """Return the least and the greatest in this format, once if they look alike; of no values, nothing."""
    ends = (min(values), max(values)) if values else ()
    return " to ".join(dict.fromkeys(format(value, shape) for value in ends))


def mean_error(block: Mapping[str, Any]) -> float | None:
    """Return the mean relative error over the maps of a block."""
    return Kind(block["name"], block["layers"]).error


class BeforeAfter(NamedTuple):
    """One figure of a model before a job and after it."""

    what: str
    on: str
    before: str
    after: str


def evaluated(report: JobReport[Work]) -> Iterator[BeforeAfter]:
    """Yield the perplexity on every text, and every task's metrics."""
    before, after = report.before, report.after
    for file, perplexity in after.perplexity.items():
        where = f"{Path(file).name}, in windows of {report.job.evaluation_length} tokens"
        yield BeforeAfter("perplexity", where, f"{before.perplexity[file]:.2f}", f"{perplexity:.2f}")
    for task, metrics in after.tasks.items():
        for metric, value in metrics.items():
            yield BeforeAfter(metric, task, f"{before.tasks[task][metric]:.4f}", f"{value:.4f}")


def work_rows(report: JobReport[Work]) -> Iterator[tuple[str, str]]:
    """Yield what a job did, in words: (what, how much)."""
    asked, work = report.job.arguments(), report.work
    if report.zeros is not None:
        yield "sparsity", str(report.zeros)
    if isinstance(work, PruneReport):
        yield from (("method", work.score), ("pattern", _pattern_in_words(report.job)))
    elif isinstance(work, Trained):
        yield "method", work.method
        windows = f"{asked['batch_size']} windows of {asked['sequence_length']} tokens"
        yield "trained", f"{work.num_steps} steps of {windows} of {_trained_on(asked)}"
    elif isinstance(work, SmallerModel):
        yield from removal_rows(work)
        yield "method", f"{work.walk.method}, {work.pattern}"
        yield "refit", refit_of_units(asked["refit"], asked["targets"]).replace("_", " ")
    else:
        yield from (("method", work.walk.method), ("pattern", _pattern_in_words(report.job, walks=True)))
    if isinstance(work, Walked):
        yield "calibration", _windows(work, asked)


def _pattern_in_words(job: Any, *, walks: bool = False) -> str:
    """Return the pattern of a ``PruningJob``, and which weights compete where it leaves that open.

    A walk decides each matrix by itself; by Wanda, each row of an unstructured one.
    """
    pattern = as_pattern(job.pattern, job.sparsity, None if walks else job.scope)
    if not pattern.has_scope:
        return str(pattern)
    if walks:
        by_row = job.method == "wanda" and pattern.by_row() is not pattern
        return f"{pattern}, each {'row' if by_row else 'matrix'} by itself"
    return f"{pattern} over all weights" if vars(pattern)["scope"] == "global" else f"{pattern}, each tensor by itself"


def _trained_on(asked: Mapping[str, Any]) -> str:
    """Return where the windows that were trained on came from, in words."""
    if asked["data"] != SELF:
        return Path(asked["data"]).name
    words = asked["own_words"]
    return f"own words, {Path(words).name}; no text" if isinstance(words, str) else "what the teacher wrote; no text"


def _windows(work: Walked, asked: Mapping[str, Any]) -> str:
    """Return what was calibrated with, in words."""
    num_text, num_continuing, num_own = (work.windows[kind] for kind in ("text", "continuing", "own"))
    tokens = f"windows of {asked['sequence_length']} tokens"
    if not num_text:
        return f"{num_own} {tokens} that the model wrote; no text"
    text = f"{num_text} {tokens} of {Path(asked['calibration']).name}"
    if not (num_written := num_continuing + num_own):
        return text
    continued = f", {num_continuing} of them continuing it" if num_continuing else ""
    return f"{text}, and {num_written} that the model wrote{continued}"


def removal_rows(work: SmallerModel) -> Iterator[tuple[str, str]]:
    """Yield what a removal has left, in words: (what, how much)."""
    num, num_before = work.num_parameters, work.num_parameters_before
    yield "parameters", f"{count(num)} of {count(num_before)}, {share(1 - num / num_before)} removed"
    sizes = {(of["kind"], of["num"], of["num_before"]): None for block in work.blocks for of in block["kept"]}
    left = [f"{kind.replace('_', ' ')} {of_kind:,} of {before:,}" for kind, of_kind, before in sizes]
    if (num_layers := len(work.layers)) < work.num_layers_before:
        left.insert(0, f"layers {num_layers} of {work.num_layers_before}")
    yield "left", "; ".join(left)


def trial_rows(work: SmallerModel) -> Iterator[tuple[str, str]]:
    """Yield what was tried for a budget of parameters, and what it cost, in words."""
    for trial in work.trials or ():
        fewer, cost = f"{trial['num_removed']:,} parameters fewer", f"log-perplexity {trial['cost']:+.4f}"
        tried = ", ".join(f"{kind.replace('_', ' ')} {size:,}" for kind, size in trial["sizes"].items())
        yield f"tried {tried}", f"{fewer}, {cost} on held-out samples"
