"""The command ``distprune``: parse, start the ranks, run, show."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
import typer

from distprune.checkpoint import inspect_directory
from distprune.cli.display import Display, show_inspection
from distprune.cli.ending import end, forgive_lost_output, open_standard_streams
from distprune.cli.options import (
    MOST_TOKENS,
    Device,
    Dtype,
    EvalLength,
    EvalTokens,
    EvaluateOn,
    Model,
    Output,
    Overwrite,
    Request,
    Tasks,
    Timeout,
    common_fields,
    number_of_samples,
    request_of,
)
from distprune.cli.ranks import Launch
from distprune.cli.shrink import shrink
from distprune.jobs import (
    FinetuneJob,
    OneShotJob,
    PruneJob,
    ShrinkJob,
    StreamedJob,
    run_finetune_job,
    run_one_shot_job,
    run_prune_job,
    run_shrink_job,
    run_streamed_job,
)
from distprune.oneshot import Allocation, OneShotMethod, Sequential, TargetsOf
from distprune.patterns import Scope, as_pattern

__all__ = ["app", "run"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Prune sharded PyTorch models in the layout they are already in.",
)

_USERS_MISTAKES = (ValueError, TypeError, NotImplementedError, OSError, ImportError)


@app.command()
def prune(
    context: typer.Context,
    model: Model,
    output: Output,
    sparsity: Annotated[
        float | None, typer.Option(help="The final share of zeros, such as 0.5. Existing zeros count toward it.")
    ] = None,
    method: Annotated[
        OneShotMethod | None,
        typer.Option(help="How weights are chosen. Default: admm with --calibration, magnitude without."),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(help="unstructured, row or block:16, with --sparsity; or N:M such as 2:4, without."),
    ] = None,
    scope: Annotated[
        Scope | None, typer.Option(help="global: all weights compete (the default). tensor: those of each tensor.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For --method random, and to draw --calibration windows.")] = 0,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Prune the parameters that match this name pattern instead of the default ones. Repeatable."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Leave out the parameters that match this name pattern. Repeatable.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    overwrite: Overwrite = False,
    evaluate_on: EvaluateOn = None,
    eval_tokens: EvalTokens = 8192,
    eval_length: EvalLength = 512,
    tasks: Tasks = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text or JSON-lines file. Prune block by block, with the inputs this text gives each layer."),
    ] = None,
    samples: Annotated[
        int, typer.Option(parser=number_of_samples, metavar="N|all", help="Calibration windows, drawn by --seed.")
    ] = "128",  # type: ignore[assignment]  # parsed, too
    sequence_length: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens in each.")] = 2048,
    allocation: Annotated[
        Allocation | None,
        typer.Option(
            help="With --calibration. uniform: all layers end with --sparsity. gradients: more zeros where the loss "
            "feels them less; the default from 0.6 on with admm."
        ),
    ] = None,
    sequential: Annotated[
        Sequential | None,
        typer.Option(help="Prune the layers of a block at once, or map by map in the order they run (admm's default)."),
    ] = None,
    targets: Annotated[
        TargetsOf | None,
        typer.Option(help="Aim at each layer's own output, or at the dense model's (admm's default)."),
    ] = None,
    target_share: Annotated[float, typer.Option(help="How much of the way to the dense model's output.")] = 0.5,
    offload: Annotated[bool, typer.Option(help="Keep activations on the CPU between blocks.")] = False,
    resume: Annotated[
        bool, typer.Option(help="Go on where a job with --calibration or --streamed that was killed has stopped.")
    ] = False,
    streamed: Annotated[
        bool,
        typer.Option("--streamed", help="Build no model: stream the weights from file to file, whatever their size."),
    ] = False,
    sync_files: Annotated[
        bool, typer.Option(help="With --streamed: wait until the output is on the disk; without, as after cp.")
    ] = True,
    timeout: Timeout = 600,
) -> None:
    """Prune MODEL and write it to --output. Start it with torchrun, mpirun or srun, or by itself."""
    try:
        as_pattern(pattern, sparsity)
    except ValueError as error:
        raise typer.BadParameter(f"--pattern, --sparsity: {error}") from None
    if not (sync_files or streamed):
        raise typer.BadParameter("--no-sync-files goes with --streamed")
    common = {**common_fields(locals()), "sparsity": sparsity, "pattern": pattern}
    job: PruneJob | OneShotJob
    if calibration is None:
        method = method or "magnitude"
        if method not in ("magnitude", "random"):
            raise typer.BadParameter(f"--method {method} needs --calibration, a text to run through the model")
        if resume and not streamed:
            raise typer.BadParameter("--resume goes with --calibration or --streamed")
        if streamed and device == "cuda":
            raise typer.BadParameter("--streamed runs on the CPU; leave out --device")
        if allocation is not None:
            raise typer.BadParameter("--allocation goes with --calibration")
        named: dict[str, Any] = {
            "method": method,
            "scope": scope,
            "include": tuple(include or ()),
            "exclude": tuple(exclude or ()),
        }
        if streamed:
            job = StreamedJob(**common, **named, resume=resume, sync_files=sync_files)
        else:
            job = PruneJob(**common, **named)
        device = "cpu" if streamed else device
    else:
        if streamed:
            raise typer.BadParameter("--streamed does not go with --calibration, which needs a model")
        if include or exclude or scope is not None:
            raise typer.BadParameter("--scope, --include and --exclude do not go with --calibration")
        job = OneShotJob(
            **common,
            method=method or "admm",
            calibration=str(calibration),
            sequential=sequential,
            targets=targets,
            target_share=target_share,
            samples=samples or None,
            sequence_length=sequence_length,
            allocation=allocation,
            offload=offload,
            resume=resume,
        )
    context.obj(request_of(job, device, timeout))


@app.command()
def finetune(
    context: typer.Context,
    model: Model,
    output: Output,
    data: Annotated[Path, typer.Option(help="Text or JSON-lines file to train on.")],
    steps: Annotated[int | None, typer.Option(min=1, help="How many steps to do; or else --minutes.")] = None,
    minutes: Annotated[float | None, typer.Option(help="How long to train; or else --steps.")] = None,
    teacher: Annotated[
        str | None, typer.Option(help="The dense model: learn what it predicts, and not the text.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, at its highest.")] = 2e-4,
    batch_size: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Windows a step, over all ranks.")] = 8,
    sequence_length: Annotated[int, typer.Option(min=2, max=MOST_TOKENS, help="Tokens in each.")] = 256,
    seed: Annotated[int, typer.Option(help="To draw the windows.")] = 0,
    save_every: Annotated[
        float, typer.Option(min=0, help="Seconds between states that --resume can go on with.")
    ] = 300,
    resume: Annotated[bool, typer.Option(help="Go on where a job that was killed has saved its last state.")] = False,
    compute_dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Of forwards. Weights are trained in float32.")
    ] = "bfloat16",
    dtype: Dtype = "auto",
    device: Device = "auto",
    overwrite: Overwrite = False,
    evaluate_on: EvaluateOn = None,
    eval_tokens: EvalTokens = 8192,
    eval_length: EvalLength = 512,
    tasks: Tasks = None,
    timeout: Timeout = 600,
) -> None:
    """Train the pruned MODEL on --data with its zeros held, and write it to --output. Start it as prune."""
    job = FinetuneJob(
        **common_fields(locals()),
        data=str(data),
        steps=steps,
        minutes=minutes,
        teacher=teacher,
        learning_rate=learning_rate,
        batch_size=batch_size,
        sequence_length=sequence_length,
        save_every=save_every,
        resume=resume,
        compute_dtype=getattr(torch, compute_dtype),
    )
    try:
        job.check_length()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    context.obj(request_of(job, device, timeout))


app.command()(shrink)


@app.command()
def inspect(
    directory: Annotated[Path, typer.Argument(help="A Hugging Face directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how sparse the model in DIRECTORY is, tensor by tensor, and which N:M patterns hold."""
    display = Display(visible=True)
    report = inspect_directory(directory, progress=partial(display.progress, "reading", "bytes"))
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        show_inspection(report)
    display.close()
    sys.stdout.flush()


def run() -> NoReturn:
    """Run the command and end the process.

    The exit code is 0 if the work is done, 1 for a user's mistake or a failure, 2 for wrong usage, and
    128 + n for signal n.
    """
    open_standard_streams()
    forgive_lost_output("stderr")
    launch = Launch()
    shown = io.StringIO()
    with contextlib.ExitStack() as stack:
        if launch.rank > 0:  # the first rank says the same, or else this one says it later
            stack.enter_context(contextlib.redirect_stdout(shown))
            stack.enter_context(contextlib.redirect_stderr(shown))
        asked = _parse()
    if isinstance(asked, Request):
        forgive_lost_output("stdout")
        end(_work(asked, launch))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if launch.leave(asked) and launch.rank > 0:
        sys.stderr.write(shown.getvalue())
    end(asked)


def _parse() -> Request | int:
    """Return what the command line asks for; if that is nothing to be run on ranks, the exit code."""
    asked: list[Request] = []
    code = 1
    try:
        app(prog_name="distprune", obj=asked.append)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except Exception as error:
        sys.stderr.write(_text(error))
    return asked[0] if asked else code


def _work(request: Request, launch: Launch) -> int:
    """Run the job on the ranks; return the exit code, which is 0 only where the output is complete."""
    try:
        device = launch.start(request.device, request.timeout)
        display = Display(visible=launch.rank == 0)
        if isinstance(request.job, StreamedJob):
            report = run_streamed_job(request.job, watcher=display)
        elif isinstance(request.job, PruneJob):
            report = run_prune_job(request.job, device=device, watcher=display)
        elif isinstance(request.job, ShrinkJob):
            report = run_shrink_job(request.job, device=device, watcher=display)
        elif isinstance(request.job, FinetuneJob):
            report = run_finetune_job(request.job, device=device, watcher=display)
        else:
            report = run_one_shot_job(request.job, device=device, watcher=display)
        launch.finish()
    except Exception as error:
        # What all ranks know the first one says for them.
        speaks_first = launch.rank == 0 or not isinstance(error, _USERS_MISTAKES)
        if speaks_first:
            sys.stderr.write(_text(error))
        if launch.leave(1) and not speaks_first:
            sys.stderr.write(f"rank {launch.rank}: {_text(error)}")
        return 1
    except (SystemExit, KeyboardInterrupt) as leaving:
        signalled = leaving.code if isinstance(leaving, SystemExit) else 130
        code = signalled if isinstance(signalled, int) and signalled else 1
        launch.leave(code)
        return code
    with contextlib.suppress(Exception):
        display.summary(report)
    return 0


def _text(error: Exception) -> str:
    """Return one line for what a user can mend; anything else is ours, and gets a traceback."""
    if isinstance(error, _USERS_MISTAKES):
        return f"error: {' '.join(str(error).split())}\n"
    return "".join(traceback.format_exception(error))
