"""What a job did: one typed report, and the rows of words that the terminal, the model card and ``compare`` print."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any, Generic, TypeAlias, TypeVar

from typing_extensions import override

from distprune.calibration.own_words import SELF
from distprune.checkpoint.hub import name_of_model
from distprune.checkpoint.inspect import InspectReport
from distprune.formatting import count, one_line, share, zeros
from distprune.jobs.options import Job
from distprune.oneshot.allocation import Allocation
from distprune.oneshot.report import OneShotReport
from distprune.pruning.report import PruneReport
from distprune.removal.choose_units import resolved_refit

OF_A_RUN = ("resumed", "seconds", "peak memory", "on a device")  # rows in which two runs of a job differ
_MOST_LINES, _WIDTH = 15, 80

Row: TypeAlias = tuple[str, str]  # what, and how much


@dataclass(frozen=True)
class Evaluation:
    """Perplexities by file, and metrics by task."""

    perplexity: Mapping[str, float] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Zeros:
    """How sparse a model is: the zeros of its prunable weights, of how many, and of how many parameters in all.

    Prunable are the weights that a job prunes by default (see ``find_shards``) or was asked to prune.
    """

    num_zeros: int
    num_prunable: int
    num_parameters: int | None  # None: unknown

    @property
    def sparsity(self) -> float:
        """The share of zeros of the prunable weights."""
        return self.num_zeros / max(self.num_prunable, 1)

    @override
    def __str__(self) -> str:
        return zeros(self.num_zeros, self.num_prunable, self.num_parameters)


@dataclass(frozen=True)
class Walked:
    """A walk through the decoder blocks. ``blocks`` are as the journal has them, with those of earlier starts.

    ``windows``: how many are of the ``text``, were written ``continuing`` it, or are the model's ``own`` altogether.
    """

    walk: OneShotReport
    pattern: str
    blocks: Sequence[Mapping[str, Any]]
    resumed_at: int
    windows: Mapping[str, int]

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{len(self.blocks)} blocks by {self.walk.method}")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON carries it."""
        return {**self.walk.to_dict(), **{key: value for key, value in vars(self).items() if key != "walk"}}


@dataclass(frozen=True, repr=False)
class PrunedBlocks(Walked):
    """Pruned block by block. ``num_parameters``: of the whole model."""

    allocation: Allocation
    num_parameters: int

    @property
    def zeros(self) -> Zeros:
        """The zeros of all blocks, those of earlier starts too."""
        layers = [layer for block in self.blocks for layer in block["layers"]]
        num_zeros, num_elements = (sum(layer[key] for layer in layers) for key in ("num_zeros", "num_elements"))
        return Zeros(num_zeros, num_elements, self.num_parameters)


@dataclass(frozen=True, repr=False)
class SmallerModel(Walked):
    """Made smaller. ``layers`` are those that stay."""

    trials: Sequence[Mapping[str, Any]] | None
    layers: Sequence[int]
    num_layers_before: int
    num_parameters_before: int
    num_parameters: int


@dataclass(frozen=True)
class Trained:
    """Fine-tuned with its zeros held: ``num_zeros`` of all ``num_elements``, and those of its prunable weights."""

    method: str
    num_steps: int
    num_tokens: int
    seconds: float
    losses: Sequence[float]
    num_zeros: int
    num_elements: int
    num_prunable_zeros: int
    num_prunable: int
    resumed_at: int

    @property
    def zeros(self) -> Zeros:
        return Zeros(self.num_prunable_zeros, self.num_prunable, self.num_elements)

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{share(self.zeros.sparsity)} sparse, {self.num_steps:,} steps of {self.method}")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON carries it."""
        return vars(self)


Work: TypeAlias = PruneReport | PrunedBlocks | SmallerModel | Trained
_Work = TypeVar("_Work", bound=Work, covariant=True)

_KEYS: dict[type, str] = {PruneReport: "pruning", PrunedBlocks: "pruning", SmallerModel: "removal", Trained: "training"}


@dataclass(frozen=True)
class JobReport(Generic[_Work]):
    """The report of a ``job`` on the model in the directory ``model``. Ranks differ in seconds."""

    job: Job
    model: Path
    versions: Mapping[str, str]
    num_ranks: int
    device: str
    before: Evaluation
    after: Evaluation
    seconds: Mapping[str, float]  # by stage
    work: _Work
    peak_memory: Sequence[int] = ()  # of each rank's process, in bytes
    peak_device_memory: Sequence[int] = ()  # of each rank's CUDA device, in bytes

    @property
    def zeros(self) -> Zeros | None:
        """How sparse the output is; ``None`` of a smaller model, whose zeros were not counted."""
        work: Work = self.work
        if isinstance(work, PruneReport):
            return Zeros(work.num_zeros, work.num_elements, work.num_parameters)
        return None if isinstance(work, SmallerModel) else work.zeros

    @property
    def done(self) -> str:
        """What was done, in words."""
        work: Work = self.work
        if isinstance(work, Trained):
            return "fine-tuned with its zeros held"
        if isinstance(work, SmallerModel):
            return f"made smaller by {work.walk.method}"
        return f"pruned by {work.score if isinstance(work, PruneReport) else work.walk.method}"

    @override
    def __repr__(self) -> str:
        return one_line(self, f"{name_of_model(self.model)}, {self.work!r}")

    @override
    def __str__(self) -> str:
        """Return what was done, in at most 15 lines; all of it is in :meth:`to_dict`."""
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"
        title = f"{name_of_model(self.model)}, {self.done} on {ranks} ({self.device})"
        lines = [title, *laid_out(rows(self.to_dict()))]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES - 1 :] = [f"  and {len(lines) - _MOST_LINES + 1} more lines in report.json"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``report.json`` has."""
        counted = self.zeros
        return {
            **self.versions,
            "model": str(self.model),
            "arguments": self.job.arguments(),
            "num_ranks": self.num_ranks,
            "device": self.device,
            "perplexity_before": self.before.perplexity,
            "perplexity_after": self.after.perplexity,
            "tasks_before": self.before.tasks,
            "tasks_after": self.after.tasks,
            "stage_seconds": self.seconds,
            "peak_memory": self.peak_memory,
            "peak_device_memory": self.peak_device_memory,
            "zeros": None if counted is None else {**vars(counted), "sparsity": counted.sparsity},
            _KEYS[type(self.work)]: self.work.to_dict(),
        }


def rows(report: Mapping[str, Any], *, in_full: bool = False) -> list[Row]:
    """Return what ``report``, as report.json has it, says in words: (what, how much). Local.

    ``in_full``: with the paths of the texts that were evaluated on, and how much of each, which tell them apart.
    """
    asked, counted, seconds = report["arguments"], report["zeros"], report["stage_seconds"]
    shown: list[Row] = []
    if counted is not None:
        shown.append(("sparsity", zeros(counted["num_zeros"], counted["num_prunable"], counted["num_parameters"])))
    for key, rows_of in _ROWS.items():
        shown += rows_of(report[key], asked) if key in report else []
    stages = ", ".join(f"{stage} {took:.1f}" for stage, took in seconds.items() if stage != "total")
    shown += [("seconds", f"{seconds['total']:.1f}: {stages}"), *memory_rows(report["peak_memory"])]
    shown += memory_rows(report["peak_device_memory"], "on a device")
    for text, (before, after) in perplexities(report, in_full=in_full).items():
        shown.append((f"perplexity on {text}", f"{before:.2f} -> {after:.2f}"))
    for task, metrics in report["tasks_after"].items():
        for metric, value in metrics.items():
            before, after = float(report["tasks_before"][task][metric]), float(value)  # "inf" is a text in JSON
            shown.append((f"{metric} on {task}", f"{before:.4f} -> {after:.4f}"))
    return shown


def perplexities(report: Mapping[str, Any], *, in_full: bool = False) -> dict[str, tuple[float, float]]:
    """Return the perplexities before and after, by text: with ``in_full`` its path and how much of it was run."""
    asked, before = report["arguments"], report["perplexity_before"]
    tokens, length = asked["evaluation_tokens"], asked["evaluation_length"]
    shown = {}
    for file, after in report["perplexity_after"].items():
        text = f"{_end_of(file, report['perplexity_after'])}, in windows of {length:,} tokens"
        text = f"{file}, {tokens:,} tokens in windows of {length:,}" if in_full else text
        shown[text] = (float(before[file]), float(after))
    return shown


def _end_of(file: str, files: Iterable[str]) -> str:
    """Return the name of ``file``, and of as many folders around it as tell it from other ``files``."""
    paths, parts = [Path(other).parts for other in files], Path(file).parts
    ends = (parts[-num:] for num in range(1, len(parts) + 1))
    return next((str(Path(*end)) for end in ends if sum(path[-len(end) :] == end for path in paths) == 1), file)


def memory_rows(sizes: Sequence[int], name: str = "peak memory") -> Iterator[Row]:
    """Yield the most that one rank had; of no ``sizes`` nothing."""
    if sizes:
        largest = f", in the largest of {len(sizes)} processes" if len(sizes) > 1 else ""
        yield name, f"{max(sizes) / 2**20:,.0f} MiB{largest}"


def _pruning_rows(pruning: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[Row]:
    if "blocks" not in pruning:
        yield from (("method", pruning["score"]), ("pattern", pruning["pattern"]))
        yield "calibration", "none: weights are chosen by their values alone"
        return
    by_row = pruning["method"] == "wanda" and pruning["pattern"].startswith("Unstructured")
    yield from (("method", pruning["method"]), ("allocation", pruning["allocation"]))
    yield "pattern", f"{pruning['pattern']}{', each row by itself' if by_row else ''}"
    yield from _walk_rows(pruning, asked)
    layers = [layer for block in pruning["blocks"] for layer in block["layers"]]
    errors = {layer["name"]: float(layer["relative_error"]) for layer in layers if layer["relative_error"] is not None}
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        yield "worst layer", f"{worst}, relative error {errors[worst]:.4f}"


def _training_rows(training: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[Row]:
    if asked["data"] != SELF:
        data = Path(asked["data"]).name
    elif isinstance(asked["own_words"], str):
        data = f"own words, {Path(asked['own_words']).name}; no text"
    else:
        data = "what the teacher wrote; no text"
    yield "method", training["method"]
    windows = f"{asked['batch_size']} windows of {asked['sequence_length']} tokens"
    yield "trained", f"{training['num_steps']} steps of {windows} of {data}"
    yield "loss", f"{training['losses'][0]:.4f} -> {training['losses'][-1]:.4f}"
    if training["resumed_at"]:
        yield "resumed", f"after step {training['resumed_at']}"


def _removal_rows(removal: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[Row]:
    num, num_before = removal["num_parameters"], removal["num_parameters_before"]
    yield "parameters", f"{count(num)} of {count(num_before)}, {share(1 - num / num_before)} removed"
    num_layers, num_layers_before = len(removal["layers"]), removal["num_layers_before"]
    left = [f"layers {num_layers} of {num_layers_before}"] if num_layers < num_layers_before else []
    kept = [kept for block in removal["blocks"] for kept in block["kept"]]
    left += [f"{units['kind'].replace('_', ' ')} {units['num']:,} of {units['num_before']:,}" for units in kept]
    yield "left", "; ".join(dict.fromkeys(left))
    yield "method", f"{removal['method']}, {removal['pattern']}"
    yield "refit", resolved_refit(asked["refit"], asked["targets"])[0].replace("_", " ")
    if removal["trials"]:
        yield "tried", f"{len(removal['trials'])} divisions of the budget"
    yield from _walk_rows(removal, asked)


def _walk_rows(walk: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what was calibrated with, and whether by an earlier start, too."""
    num_text, num_continuing, num_own = (walk["windows"][kind] for kind in ("text", "continuing", "own"))
    tokens = f"windows of {asked['sequence_length']} tokens"
    if num_text:
        continued = f", {num_continuing} of them continuing it" if num_continuing else ""
        num_written = num_continuing + num_own
        written = f", and {num_written} that the model wrote{continued}" if num_written else ""
        yield "calibration", f"{num_text} {tokens} of {Path(asked['calibration']).name}{written}"
    else:
        yield "calibration", f"{num_own} {tokens} that the model wrote; no text"
    if walk["resumed_at"]:
        yield "resumed", f"at block {walk['resumed_at']}: seconds and memory are of this run alone"


_ROWS = {"removal": _removal_rows, "training": _training_rows, "pruning": _pruning_rows}


def inspection_rows(report: InspectReport) -> list[Row]:
    """Return how sparse a model directory is."""
    of_all = f"{share(report.sparsity)} of {count(report.num_elements)} parameters are zero"
    if report.prunable_zeros is None:
        return [("sparsity", of_all)]
    return [("sparsity", zeros(*report.prunable_zeros)), ("all zeros", of_all)]


def laid_out(shown: Iterable[Row]) -> list[str]:
    """Return the lines of rows, wrapped; a path or another long word is not cut."""
    lines = []
    for name, text in shown:
        paragraph = f"  {name:<11}  {text}"
        lines += wrap(paragraph, _WIDTH, subsequent_indent=" " * 15, break_long_words=False, break_on_hyphens=False)
    return lines
