"""What a person reads off a report: rows of words, which all forms of it print, and errors by kind of linear map.

Noun: a *kind* is the linear maps of a block whose names differ in numbers alone: one projection, or the
same projection of all experts, which are too many to be shown one by one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeAlias

from distprune.calibration.own_words import SELF
from distprune.checkpoint.inspect import InspectReport, TensorReport
from distprune.formatting import count, share, zeros
from distprune.removal.choose_units import resolved_refit

WIDTH = 80  # columns of a terminal
OF_A_RUN = ("resumed", "seconds", "peak memory", "on a device")  # rows in which two runs of a job differ
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component of a dotted name

Row: TypeAlias = tuple[str, str]


def rows(report: Mapping[str, Any], *, in_full: bool = False) -> list[Row]:
    """Return what ``report``, as report.json has it, says in words: (what, how much). Local.

    ``in_full``: with the paths of the texts that were evaluated on, and how much of each, which tell them apart.
    """
    asked, counted, seconds = report["arguments"], report["zeros"], report["stage_seconds"]
    shown: list[Row] = []
    if counted is not None:
        shown.append(("sparsity", zeros(*(counted[key] for key in ("num_zeros", "num_prunable", "num_parameters")))))
    if "removal" in report:
        shown += _removal_rows(report["removal"], asked)
    elif "training" in report:
        shown += _training_rows(report["training"], asked)
    else:
        shown += _pruning_rows(report["pruning"], asked)
    stages = ", ".join(f"{stage} {took:.1f}" for stage, took in seconds.items() if stage != "total")
    shown += [("seconds", f"{seconds['total']:.1f}: {stages}"), *memory_rows(report["peak_memory"])]
    shown += memory_rows(report["peak_device_memory"], "on a device")
    for text, (before, after) in perplexities(report, in_full=in_full).items():
        shown.append((f"perplexity on {text}", f"{before:.2f} -> {after:.2f}"))
    for task, metrics in report["tasks_after"].items():
        shown += [
            (f"{metric} on {task}", f"{report['tasks_before'][task][metric]:.4f} -> {value:.4f}")
            for metric, value in metrics.items()
        ]
    return shown


def perplexities(report: Mapping[str, Any], *, in_full: bool = False) -> dict[str, tuple[float, float]]:
    """Return the perplexities before and after, by text: with ``in_full`` its path and how much of it was run."""
    asked, before = report["arguments"], report["perplexity_before"]
    tokens, length = asked["evaluation_tokens"], asked["evaluation_length"]
    shown = {}
    for file, after in report["perplexity_after"].items():
        text = f"{Path(file).name}, in windows of {length:,} tokens"
        text = f"{file}, {tokens:,} tokens in windows of {length:,}" if in_full else text
        shown[text] = (float(before[file]), float(after))
    return shown


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
    layers = [layer for block in pruning["blocks"] for layer in block["layers"] if layer["relative_error"] is not None]
    if layers:
        worst = max(layers, key=lambda layer: layer["relative_error"])
        yield "worst layer", f"{worst['name']}, relative error {worst['relative_error']:.4f}"


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
    sizes = {
        (kept["kind"], kept["num"], kept["num_before"]): None for block in removal["blocks"] for kept in block["kept"]
    }
    left = [f"{kind.replace('_', ' ')} {num:,} of {before:,}" for kind, num, before in sizes]
    if (num_layers := len(removal["layers"])) < removal["num_layers_before"]:
        left.insert(0, f"layers {num_layers} of {removal['num_layers_before']}")
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


def inspection_rows(report: InspectReport) -> list[Row]:
    """Return how sparse a model directory is."""
    of_all = f"{share(report.sparsity)} of {count(report.num_elements)} parameters are zero"
    if report.prunable_zeros is None:
        return [("sparsity", of_all)]
    return [("sparsity", zeros(*report.prunable_zeros)), ("all zeros", of_all)]


def laid_out(shown: Iterable[Row], width: int = WIDTH) -> list[str]:
    """Return the lines of rows, wrapped; a path or another long word is not cut."""
    lines = []
    for name, text in shown:
        paragraph = f"  {name:<11}  {text}"
        lines += wrap(paragraph, width, subsequent_indent=" " * 15, break_long_words=False, break_on_hyphens=False)
    return lines


def errors_by_kind(blocks: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float | None]]:
    """Return the mean relative error of every kind of linear map, by the number of the block."""
    kinds: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for block in blocks:
        for layer in block["layers"]:
            kind = _NUMBER.sub("*", str(layer["name"]).removeprefix(f"{block['name']}."))
            kinds.setdefault(kind, {}).setdefault(int(block["index"]), []).append(layer)
    return {kind: {i: mean_error(layers) for i, layers in by_block.items()} for kind, by_block in kinds.items()}


def mean_error(layers: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the mean relative error of those layers of a block that have one."""
    errors = [layer["relative_error"] for layer in layers if layer["relative_error"] is not None]
    return sum(errors) / len(errors) if errors else None


def kinds_of_tensors(tensors: Sequence[TensorReport]) -> dict[str, list[TensorReport]]:
    """Return the tensors whose names differ in numbers alone, by their name with ``*`` for numbers, in order."""
    kinds: dict[str, list[TensorReport]] = {}
    for tensor in tensors:
        kinds.setdefault(_NUMBER.sub("*", tensor.name), []).append(tensor)
    return kinds
