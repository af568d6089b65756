"""What the jobs have in common."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distprune.checkpoint import HfDirectory, load_tokenizer, open_directory
from distprune.cli.display import Display
from distprune.cli.launchers import Ranks
from distprune.collectives import agree, together
from distprune.evaluation import perplexity, tokenize_file
from distprune.selection import Pattern

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["REPORT_NAME", "evaluate", "flags", "open_source", "report_head", "write_report"]

REPORT_NAME = "report.json"


def arguments_of(job: DataclassInstance) -> dict[str, Any]:
    """Return what a job was asked for as JSON carries it, but for ``resume``, which changes nothing in the end."""
    values = {field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.name != "resume"}
    return {name: str(value) if isinstance(value, torch.dtype | Pattern) else value for name, value in values.items()}


def flags(job: DataclassInstance) -> dict[str, Any]:
    """Return :func:`arguments_of` a job under the names a user knows them by, for the ranks to agree on."""
    return {f"--{name.replace('_', '-')}": value for name, value in arguments_of(job).items()}


def open_source(
    path: Path, ranks: Ranks, evaluate_on: str | None, num_tokens: int, sequence_length: int
) -> tuple[HfDirectory, torch.Tensor | None]:
    """Open the model and tokenize the text to evaluate on; all ranks must see the same of both."""
    seen: dict[str, str] = {}
    tokens: torch.Tensor | None = None
    with together(ranks.comm):
        directory = open_directory(path)
        seen["model files"] = directory.fingerprint()
        if evaluate_on is not None:
            tokens = tokenize_file(
                load_tokenizer(path), evaluate_on, max_tokens=num_tokens, sequence_length=sequence_length
            )
            seen["evaluation tokens"] = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    agree(ranks.comm, seen)
    return directory, tokens


def evaluate(
    model: torch.nn.Module,
    tokens: torch.Tensor | None,
    sequence_length: int,
    ranks: Ranks,
    display: Display,
    title: str,
) -> float | None:
    """Return the perplexity on ``tokens``, if there are any."""
    if tokens is None:
        return None
    with display.progress(title, "windows") as progress:
        return perplexity(model, tokens, sequence_length=sequence_length, group=ranks.comm, progress=progress)


def report_head(
    job: DataclassInstance,
    directory: HfDirectory,
    ranks: Ranks,
    perplexities: tuple[float | None, float | None],
) -> dict[str, Any]:
    """Return what every job's report begins with."""
    return {
        "distprune": version("distprune"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "model": str(directory.path),
        "arguments": arguments_of(job),
        "num_ranks": ranks.comm.size,
        "device": ranks.device.type,
        "perplexity_before": perplexities[0],
        "perplexity_after": perplexities[1],
    }


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Write ``report.json``. Local; for one rank."""
    text = json.dumps(strict_json(report), indent=2, allow_nan=False) + "\n"
    (folder / REPORT_NAME).write_text(text, encoding="utf-8")


def strict_json(value: Any) -> Any:
    """Return ``value`` with infinities and NaN as text: JSON has no numbers for them."""
    if isinstance(value, Mapping):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
