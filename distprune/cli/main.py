"""The command ``distprune``: parse, build, call."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer

from distprune.checkpoint import BUNDLED, inspect_directory
from distprune.cli.display import Display, show_inspection
from distprune.cli.launchers import likely_rank, started
from distprune.cli.one_shot_job import OneShotJob, run_one_shot_job
from distprune.cli.prune_job import PruneJob, run_job
from distprune.methods import Method
from distprune.selection import Block, NByM, Pattern, PerRow, Unstructured

__all__ = ["app", "run"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Prune sharded PyTorch models in the layout they are already in.",
)

# What a user can mend; anything else is ours, and gets a traceback.
_USERS_MISTAKES = (ValueError, TypeError, NotImplementedError, OSError, ImportError)
_AFTER_FIRST_RANK = 2.0  # seconds: launchers end the other ranks within one


class MethodName(StrEnum):
    magnitude = "magnitude"
    random = "random"
    wanda = "wanda"
    sparsegpt = "sparsegpt"


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
    amount: Annotated[
        str | None, typer.Option(help="0.3: that fraction; 1000, without a point: that many weights.")
    ] = None,
    method: Annotated[MethodName, typer.Option(help="How a weight's importance is measured.")] = MethodName.magnitude,
    scope: Annotated[
        ScopeName | None, typer.Option(help="All weights compete (the default), or those of each tensor.")
    ] = None,
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
    pattern: Annotated[
        str | None, typer.Option(help="unstructured, row, block:16, or N:M such as 2:4 (without --amount).")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Text or JSON-lines file; prune block by block, with what it makes of them.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Calibration sequences.")] = 128,
    sequence_length: Annotated[int, typer.Option(min=1, help="Tokens in each.")] = 2048,
    offload: Annotated[bool, typer.Option(help="Keep activations on the CPU between blocks.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with what a killed calibration job has left.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a rank waits for the others.")] = 600,
) -> None:
    """Prune MODEL and write it to --output. Start it with torchrun, mpirun or srun, or by itself."""
    common: dict[str, Any] = {
        "model": model,
        "output": str(output),
        "seed": seed,
        "dtype": None if dtype is DtypeName.auto else getattr(torch, dtype.value),
        "overwrite": overwrite,
        "evaluate_on": None if evaluate_on is None else str(evaluate_on),
        "evaluation_tokens": eval_tokens,
        "evaluation_length": eval_length,
    }
    if calibration is None:
        if method.value not in get_args(Method):
            raise typer.BadParameter(f"--method {method.value} needs --calibration, a text to run through the model")
        if resume:
            raise typer.BadParameter("--resume goes with --calibration")
        if amount is None and pattern is None:
            raise typer.BadParameter("--amount is missing: how much to prune")
        job = PruneJob(
            **common,
            method=cast(Method, method.value),
            scope=None if scope is None else scope.value,
            amount=None if amount is None or pattern is not None else _amount(amount),
            pattern=None if pattern is None else _pattern(pattern, amount),
            again=again,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
        )
        with started(device.value, timeout) as ranks:
            run_job(job, ranks, Display(visible=ranks.comm.rank == 0))
        return
    if again or include or exclude or scope is not None:
        raise typer.BadParameter("--scope, --again, --include and --exclude do not go with --calibration")
    one_shot = OneShotJob(
        **common,
        method=method.value,
        pattern=_pattern(pattern or "unstructured", amount),
        calibration=str(calibration),
        samples=samples,
        sequence_length=sequence_length,
        offload=offload,
        resume=resume,
    )
    with started(device.value, timeout) as ranks:
        run_one_shot_job(one_shot, ranks, Display(visible=ranks.comm.rank == 0))


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
        _end(f"error: {error}\n", known_to_all=True)
    except Exception:
        _end(traceback.format_exc(), known_to_all=False)
    except SystemExit as leaving:
        if leaving.code:  # wrong usage, or a signal: other ranks may be gone
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(leaving.code if isinstance(leaving.code, int) else 1)
        raise


def _amount(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a fraction such as 0.3 nor a count such as 1000") from None


def _pattern(text: str, amount: str | None) -> Pattern:
    name, _, number = text.partition(":")
    if name.isdecimal() and number.isdecimal():
        if amount is not None:
            raise typer.BadParameter(f"--pattern {text} says how much goes; leave out --amount {amount}")
        return NByM(int(name), int(number))
    if text not in ("unstructured", "row") and not (name == "block" and number.isdecimal()):
        raise typer.BadParameter(
            f"--pattern {text!r} is none of unstructured, row, N:M such as 2:4, or block:SIZE such as block:16"
        )
    fraction = None if amount is None else _amount(amount)
    if not isinstance(fraction, float):
        given = "" if amount is None else f", not {amount}"
        raise typer.BadParameter(f"--pattern {text} needs --amount, a fraction such as 0.5{given}")
    if name == "block":
        return Block(int(number), fraction)
    return Unstructured(fraction) if text == "unstructured" else PerRow(fraction)


def _end(text: str, *, known_to_all: bool) -> None:
    """Say what went wrong, and end at once: with a rank gone, an orderly end could wait for it.

    Of a mistake all ranks know, as a rule: the first one speaks, and its launcher ends the others before
    it is their turn. A rank that failed by itself still has its say.
    """
    rank = likely_rank(os.environ)
    if known_to_all and rank > 0:
        time.sleep(_AFTER_FIRST_RANK)
        text = f"rank {rank}: {text}"
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and not known_to_all:
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)
