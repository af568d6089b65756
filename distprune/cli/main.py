"""The command ``distprune``: parse, build, call."""

from __future__ import annotations

import json
import os
import sys
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from distprune.checkpoint import BUNDLED, inspect_directory
from distprune.cli.display import Display, show_inspection
from distprune.cli.launchers import started
from distprune.cli.prune_job import PruneJob, run_job

__all__ = ["app", "run"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Prune sharded PyTorch models in the layout they are already in.",
)

# What a user can mend; anything else is ours, and gets a traceback.
_USERS_MISTAKES = (ValueError, TypeError, NotImplementedError, OSError, ImportError)


class MethodName(StrEnum):
    magnitude = "magnitude"
    random = "random"


class ScopeName(StrEnum):
    global_ = "global"
    tensor = "tensor"


class DtypeName(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class DeviceName(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.command()
def prune(
    model: Annotated[str, typer.Argument(help=f"A Hugging Face directory, or {BUNDLED} for the bundled model.")],
    output: Annotated[Path, typer.Option(help="Directory to write; it must not exist, or be empty.")],
    amount: Annotated[str, typer.Option(help="0.3: that fraction; 1000, without a point: that many weights.")],
    method: Annotated[MethodName, typer.Option(help="How a weight's importance is measured.")] = MethodName.magnitude,
    scope: Annotated[ScopeName, typer.Option(help="All weights compete, or those of each tensor.")] = ScopeName.global_,
    seed: Annotated[int, typer.Option(help="For --method random.")] = 0,
    again: Annotated[bool, typer.Option(help="Zeros were pruned before: AMOUNT is of what is left.")] = False,
    include: Annotated[
        list[str] | None, typer.Option(help="Prune what matches this name pattern instead; may be repeated.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Leave out what matches; may be repeated.")] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Of the weights; auto: as they are.")] = DtypeName.auto,
    device: Annotated[DeviceName, typer.Option(help="auto: CUDA where there is a GPU.")] = DeviceName.auto,
    overwrite: Annotated[bool, typer.Option(help="Replace what is in the output directory.")] = False,
    evaluate_on: Annotated[
        Path | None, typer.Option("--eval", help="Text file; report perplexity on it before and after.")
    ] = None,
    eval_tokens: Annotated[int, typer.Option(min=2, help="How much of the text to use.")] = 8192,
    eval_length: Annotated[int, typer.Option(min=2, help="Tokens in one window.")] = 512,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a rank waits for the others.")] = 600,
) -> None:
    """Prune MODEL and write it to --output. Start it with torchrun, mpirun or srun, or by itself."""
    with started(device.value, timeout) as ranks:
        job = PruneJob(
            model=model,
            output=str(output),
            method=method.value,
            scope=scope.value,
            amount=_amount(amount),
            seed=seed,
            again=again,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            dtype=None if dtype is DtypeName.auto else getattr(torch, dtype.value),
            overwrite=overwrite,
            evaluate_on=None if evaluate_on is None else str(evaluate_on),
            evaluation_tokens=eval_tokens,
            evaluation_length=eval_length,
        )
        run_job(job, ranks, Display(visible=ranks.comm.rank == 0))


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="A Hugging Face directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how sparse the model in DIRECTORY is, tensor by tensor, and which N:M patterns hold."""
    with Display(visible=True).progress("reading", "bytes") as progress:
        report = inspect_directory(directory, progress=progress)
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        show_inspection(report)


def run() -> None:
    """Run the command and end the process: 0, 1 for a user's mistake or a failure, 2 for wrong usage."""
    try:
        app(prog_name="distprune", standalone_mode=True)
    except _USERS_MISTAKES as error:
        _end(f"error: {error}\n")
    except Exception:
        _end(traceback.format_exc())


def _amount(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a fraction such as 0.3 nor a count such as 1000") from None


def _end(text: str) -> None:
    """Say what went wrong once, and end at once: with a rank gone, an orderly end could wait for it."""
    if _speaks(text):
        sys.stderr.write(text)
    sys.stderr.flush()
    sys.stdout.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not text.startswith("error:"):
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)


def _speaks(text: str) -> bool:
    """Return whether this rank prints: all ranks fail with the same error, so one of them is enough."""
    rank = next(
        (
            os.environ[name]
            for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
            if name in os.environ
        ),
        "0",
    )
    return rank == "0" or not text.startswith("error:")
