"""Options that all jobs have, and what a command line comes to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
import typer

from distprune.jobs import FinetuneJob, OneShotJob, PruneJob, ShrinkJob

__all__ = [
    "MOST_TOKENS",
    "Device",
    "Dtype",
    "EvalLength",
    "EvalTokens",
    "EvaluateOn",
    "Model",
    "Output",
    "Overwrite",
    "Request",
    "Tasks",
    "Timeout",
    "common_fields",
    "number_of_samples",
    "request_of",
]

_LONGEST_TIMEOUT = 1e6  # seconds; torch counts milliseconds in 32 bits in places
MOST_TOKENS = 1 << 30

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceName = Literal["auto", "cpu", "cuda"]

# Options of all jobs.
Model = Annotated[
    str,
    typer.Argument(help="A Hugging Face directory, or org/name[@revision] of the hub."),
]
Output = Annotated[Path, typer.Option(help="Directory to write. It must not exist, or be empty.")]
Dtype = Annotated[DtypeName, typer.Option(help="Of the weights that are written. auto: as they are stored.")]
Device = Annotated[DeviceName, typer.Option(help="auto: CUDA where there is a GPU.")]
Overwrite = Annotated[bool, typer.Option(help="Replace the model in the output directory.")]
EvaluateOn = Annotated[
    list[Path] | None,
    typer.Option("--eval", help="Text or JSON-lines file. Report the perplexity before and after. Repeatable."),
]
EvalTokens = Annotated[int, typer.Option(min=2, max=MOST_TOKENS, help="How much of each to use.")]
EvalLength = Annotated[int, typer.Option(min=2, max=MOST_TOKENS, help="Tokens in one window.")]
Tasks = Annotated[
    list[str] | None,
    typer.Option(help="Tasks of lm-eval, such as hellaswag,arc_easy: report them before and after."),
]
Timeout = Annotated[float, typer.Option(help="Seconds a rank waits for the others.")]

AnyJob: TypeAlias = PruneJob | OneShotJob | FinetuneJob | ShrinkJob


@dataclass(frozen=True)
class Request:
    """A job, and where to run it."""

    job: AnyJob
    device: str
    timeout: float


def number_of_samples(text: str) -> int:
    """Return how many windows are meant; 0: all."""
    if text == "all":
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= MOST_TOKENS:
        raise typer.BadParameter(f"{text!r} is neither 'all' nor a number from 1 to {MOST_TOKENS}")
    return int(text)


def common_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Return what every job is asked for, of the options as they are ``given``."""
    dtype = given["dtype"]
    return {
        "model": given["model"],
        "output": str(given["output"]),
        "seed": given["seed"],
        "dtype": None if dtype == "auto" else getattr(torch, dtype),
        "overwrite": given["overwrite"],
        "evaluate_on": tuple(map(str, given["evaluate_on"] or ())),
        "evaluation_tokens": given["eval_tokens"],
        "evaluation_length": given["eval_length"],
        "tasks": tuple(name for names in given["tasks"] or () for name in names.split(",")),
    }


def request_of(job: AnyJob, device: DeviceName, timeout: float) -> Request:
    """Return what is to be run.

    Raises:
        typer.BadParameter: no such timeout.
    """
    if not 1 <= timeout <= _LONGEST_TIMEOUT:
        raise typer.BadParameter(f"--timeout {timeout:g} is not between 1 and {_LONGEST_TIMEOUT:g} seconds")
    return Request(job, device, timeout)
