"""The model card beside a pruned model: README.md, as the Hugging Face hub shows it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distprune.checkpoint import import_extra, name_of_model
from distprune.jobs.figures import by_metric, removal_rows, shares_by_kind

__all__ = ["CARD_NAME", "model_card", "write_card"]

CARD_NAME = "README.md"

_OPTIONS = {"evaluate_on": "eval", "evaluation_tokens": "eval-tokens", "evaluation_length": "eval-length"}
_NOT_SHOWN = ("model", "output", "overwrite", "speed")
_FILES = ("calibration", "data", "evaluate_on", "tasks", "teacher")
_COUNTS = ("num_zeros", "num_elements")
_TAGS = ("distprune", "pruned")
# What was done in words, the command, and what its output is called, by what the report has.
_DONE = {
    "training": ("fine-tuned with its zeros held", "finetune", "finetuned"),
    "removal": ("made smaller", "shrink", "smaller"),
    "pruning": ("pruned", "prune", "pruned"),
}


def write_card(report: Mapping[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    """Write ``README.md``, the model card. Local; for one rank.

    One that cannot be made, of a model whose own card is damaged, is left out, and that is said.
    """
    original = Path(report["model"]) / CARD_NAME
    try:
        card = model_card(report, original.read_text(encoding="utf-8") if original.is_file() else None)
    except Exception as error:
        say(f"{CARD_NAME} is left as it was: {type(error).__name__}: {error}")
        return
    (folder / CARD_NAME).write_text(card, encoding="utf-8")


def model_card(report: Mapping[str, Any], original: str | None) -> str:
    """Return the card of the job of ``report``; ``original``: the card of the model before. Local.

    The metadata of ``original`` stay (its license, its languages), and its text follows.
    """
    card_type = import_extra("huggingface_hub", "hf").ModelCard
    begins = original is not None and original.startswith("---")
    card = card_type(original if begins else "---\nlibrary_name: transformers\n---\n" + (original or ""))
    path = Path(report["model"])
    name = name_of_model(path)
    card.data.base_model = name
    kind = next(kind for kind in _DONE if kind in report)
    rows = {"training": _of_training, "removal": _of_removal, "pruning": _of_pruning}[kind](report)
    card.data.tags = sorted({*(card.data.tags or ()), *_TAGS, *(() if kind == "removal" else ("sparse",))})
    done, verb, result = _DONE[kind]
    lines = [f"# {name}, {done}", "", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)]
    lines += [f"| {key} | {value} |" for key, value in _of_both(report)]
    if "(" not in (report["arguments"].get("pattern") or ""):  # else a Pattern, from Python
        revision = "" if name == path.name else f"@{path.name}"  # of the hub: the commit
        lines += ["", "Made by", "", "```bash", _command(report, [verb, name + revision], result), "```"]
    if card.text.strip():
        lines += ["", f"What follows is the card of {name} before it was {done}.", "", card.text.strip()]
    card.text = "\n".join(lines) + "\n"
    return str(card)


def _of_pruning(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    arguments, pruning = report["arguments"], report["pruning"]
    linears = [of for block in pruning.get("blocks", ()) for of in block["layers"]] or pruning["parameters"]
    yield "zeros in the pruned weights", _share(*(sum(int(of[key]) for of in linears) for key in _COUNTS))
    yield "method", arguments["method"]
    yield "pattern", pruning["pattern"]
    if pruning.get("allocation") == "gradients":
        by_kind = (f"{kind} {shares}" for kind, shares in shares_by_kind(pruning["blocks"]).items())
        yield "zeros by layer, allocated by gradients", "<br>".join(by_kind)
    if "calibration" in arguments:
        yield "calibration", _calibration(arguments, pruning["num_samples"])


def _of_removal(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    arguments, removal = report["arguments"], report["removal"]
    yield from removal_rows(removal)
    yield "method", f"{removal['method']}, {arguments['refit'].replace('_', ' ')}"
    yield "calibration", _calibration(arguments, removal["num_samples"])


def _calibration(arguments: Mapping[str, Any], num_samples: int) -> str:
    return f"{num_samples} windows of {arguments['sequence_length']} tokens of {Path(arguments['calibration']).name}"


def _of_training(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    arguments, training = report["arguments"], report["training"]
    windows = f"{arguments['batch_size']} windows of {arguments['sequence_length']} tokens"
    yield "zeros", _share(*(training[key] for key in _COUNTS))
    yield "method", training["method"]
    yield "trained", f"{training['num_steps']} steps of {windows} of {Path(arguments['data']).name}"


def _of_both(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for file, after in report["perplexity_after"].items():
        where = f"{Path(file).name}, in windows of {report['arguments']['evaluation_length']} tokens"
        yield f"perplexity on {where}", f"{report['perplexity_before'][file]:.2f} before, {after:.2f} after"
    for task, metric, before, after in by_metric(report):
        yield f"{task}, {metric}", f"{before:.4f} before, {after:.4f} after"
    yield "made with", f"distprune {report['distprune']}, torch {report['torch']}"


def _share(num_zeros: int, num_elements: int) -> str:
    return f"{num_zeros:,} of {num_elements:,} ({num_zeros / max(num_elements, 1):.2%})"


def _command(report: Mapping[str, Any], words: list[str], result: str) -> str:
    """Return the command line that begins with ``words`` and writes to the model's name and ``result``."""
    name, words = words[1].partition("@")[0].rpartition("/")[2], list(words)
    for key, value in report["arguments"].items():
        option = f"--{_OPTIONS.get(key, key).replace('_', '-')}"
        if key == "samples" and value is None:
            value = "all"
        if key in _NOT_SHOWN or value is None or value is False:
            continue
        if value is True:
            words.append(option)
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [
                option,
                Path(each).name if key in _FILES else str(each).removeprefix("torch."),
            ]
    return shlex.join(["distprune", *words, "--output", f"{name}-{result}"])
