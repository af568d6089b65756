"""The command ``distprune``: parse, start the ranks, run, show."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from distprune import jobs
from distprune.checkpoint.inspect import inspect_directory
from distprune.cli.commands import JobCommand, add_command, as_epilog
from distprune.cli.launch import end, finish_ranks, likely_rank, start_ranks, tell_torchrun, torch_variables
from distprune.cli.show import Display, ignore_write_errors, open_standard_streams, summary
from distprune.cli.usage import UsageError, usage_text
from distprune.collectives.base import as_told, cannot_meet, has_lost_ranks
from distprune.formatting import printable
from distprune.mistakes import is_expected, was_told
from distprune.oneshot.estimate import is_out_of_memory
from distprune.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
)

_RUN: dict[type[jobs.BareJob], Callable[..., Any]] = {
    jobs.PruneJob: jobs.run_prune_job,
    jobs.OneShotJob: jobs.run_one_shot_job,
    jobs.PlanJob: jobs.run_plan_job,
    jobs.StreamedJob: jobs.run_streamed_job,
    jobs.FinetuneJob: jobs.run_finetune_job,
    jobs.ShrinkJob: jobs.run_shrink_job,
    jobs.SampleJob: jobs.run_sample_job,
}
# What takes less memory once the weights are loaded, by the field of a job.
_WAYS = {
    "offload": "--offload",
    "samples": "fewer --samples",
    "batch_size": "a smaller --batch-size",
    "sequence_length": "a smaller --sequence-length",
    "expert_memory": "less --expert-memory of a mixture",
}
_GRACE = 2.0  # seconds in which the first rank speaks and the launcher ends the others
_LOST = re.compile("Connection (closed|reset) by peer|Broken pipe")  # as gloo says it, also in FSDP2's collectives


def _kind_of_pruning(given: Mapping[str, Any]) -> str:
    """Return what ``prune`` does: plan, stream from file to file, walk with windows of text, or go by the weights."""
    if given.get("plan"):
        return "--plan"
    if given.get("streamed"):
        if given.get("device") == "cuda":
            raise UsageError("--streamed runs on the CPU; leave out --device")
        return "--streamed"
    calibrates = "calibration" in given or "own_words" in given
    return "--calibration" if calibrates or given.get("method") not in (None, "magnitude", "random") else ""


add_command(
    app,
    "prune",
    "Prune MODEL and write it to --output. Start it with torchrun, mpirun or srun, or by itself.",
    {"": jobs.PruneJob, "--calibration": jobs.OneShotJob, "--streamed": jobs.StreamedJob, "--plan": jobs.PlanJob},
    (
        "distprune prune gpt2 --sparsity 0.3 --output pruned --eval test.txt",
        "torchrun --nproc-per-node 8 -m distprune prune llama --pattern 2:4 --method admm --output pruned",
    ),
    _kind_of_pruning,
)
add_command(
    app,
    "finetune",
    "Train MODEL on --data, with its zeros held if it is pruned, and write it to --output. Start it as prune.",
    {"": jobs.FinetuneJob},
    (
        "distprune finetune pruned --teacher llama --minutes 10 --output recovered",
        "distprune finetune pruned --data train.txt --steps 500 --output recovered --eval test.txt",
    ),
)
add_command(
    app,
    "shrink",
    "Make MODEL smaller, by what is said to stay, and write it to --output. Start it as prune.\n\n"
    "A size is a number, such as 6, or a share, such as 0.75. --parameters is divided over the sizes not said.",
    {"": jobs.ShrinkJob},
    (
        "distprune shrink llama --parameters 0.8 --output smaller --eval test.txt",
        "distprune shrink llama --mlp 0.75 --layers 24 --calibration train.txt --output smaller",
    ),
)
add_command(
    app,
    "sample",
    "Have MODEL write windows of tokens into the file --output, for --own-words. Start it as prune.",
    {"": jobs.SampleJob},
    (
        "distprune sample llama --output words",
        "distprune sample llama --samples 512 --sequence-length 256 --output words",
    ),
)


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Prune sharded PyTorch models in the layout they are already in."""
    if version:
        typer.echo(f"distprune {__version__}")
        raise typer.Exit


@app.command(epilog=as_epilog(("distprune inspect pruned", "distprune inspect pruned --json")))
def inspect(
    directory: Annotated[Path, typer.Argument(help="A Hugging Face directory.", metavar="DIRECTORY")],
    as_json: Annotated[bool, typer.Option("--json", help="Print all as JSON instead.")] = False,
) -> None:
    """Show how sparse the model in DIRECTORY is, by kinds of tensors, and which N:M patterns hold."""
    with contextlib.closing(Display(visible=True)) as display:
        report = inspect_directory(directory, progress=partial(display.progress, "reading", "bytes"))
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict(), indent=2) + "\n")
    else:
        display.show(summary(report))
    sys.stdout.flush()


@app.command(epilog=as_epilog(("distprune compare pruned-30 pruned-50", "distprune compare pruned* --output all.png")))
def compare(
    outputs: Annotated[
        list[Path], typer.Argument(help="Directories that jobs have written, or of models.", metavar="OUTPUT...")
    ],
    picture: Annotated[
        Path | None,
        typer.Option("--output", help="Draw perplexity against sparsity into this PNG (extra plot).", metavar="FILE"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture.")] = False,
) -> None:
    """Show outputs of jobs side by side: sparsity, parameters, perplexity by text, seconds and method."""
    with contextlib.closing(Display(visible=True)) as display:
        comparison = jobs.compare_outputs(outputs, progress=partial(display.progress, "reading", "bytes"))
    if picture is not None:
        comparison.draw(picture, overwrite=overwrite)
    sys.stdout.write(f"{comparison}\n")
    sys.stdout.flush()


def run() -> NoReturn:
    """Run the command and end the process.

    The exit code is 0 if the work is done, 1 for a user's mistake or a failure, 2 for wrong usage, and
    128 + n for signal n.
    """
    open_standard_streams()
    faulthandler.enable(2)
    ignore_write_errors("stderr")
    asked: list[JobCommand] = []
    command: Any = typer.main.get_command(app)
    code, text = 1, ""
    try:
        os.environ.update(torch_variables(os.environ))
        left = command.main(prog_name="distprune", obj=asked.append, standalone_mode=False)
        code = left if isinstance(left, int) else 0
    except UsageError as error:
        code, text = error.exit_code, usage_text(error)
    except Exception as error:
        text = _text(error)
    if asked:
        ignore_write_errors("stdout")
        end(_work(asked[0]))
    _say(text, is_known=True)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    end(code)


def _say(text: str, *, is_known: bool) -> None:
    """Write an error. What all ranks know the first one says, and another only if nobody has ended it after that."""
    rank = likely_rank(os.environ)
    if text and is_known and rank > 0:
        time.sleep(_GRACE)
        text = f"rank {rank}: {text}"
    sys.stderr.write(text)


def _work(start: JobCommand) -> int:
    """Run the job on the ranks; return the exit code, which is 0 only where the output is complete."""
    display = None
    try:
        is_streamed = isinstance(start.job, jobs.StreamedJob)  # on the CPU
        device = start_ranks("cpu" if is_streamed else start.running.device, start.running.timeout)
        where = {} if is_streamed else {"device": device}
        with contextlib.closing(Display(visible=likely_rank(os.environ) == 0)) as display:
            report = _RUN[type(start.job)](start.job, **where, watcher=display)
        finish_ranks()
    except (SystemExit, KeyboardInterrupt) as leaving:
        signalled = leaving.code if isinstance(leaving, SystemExit) else 130
        return signalled if isinstance(signalled, int) and signalled else 1
    except BaseException as caught:
        error = as_told(caught)
        is_known = _has_lost_ranks(error) or ((is_expected(error) or was_told(error)) and not cannot_meet(error))
        text = _text(error, start.job, "starting" if display is None else display.stage)
        tell_torchrun(text)
        _say(text, is_known=is_known)
        return 1
    with contextlib.suppress(Exception):
        display.show(summary(report))
    return 0


def _has_lost_ranks(error: Exception) -> bool:
    return has_lost_ranks(error) or (isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None)


def _text(error: Exception, job: jobs.BareJob | None = None, stage: str = "") -> str:
    """Return one line for what a check found, a lost rank or too little memory; what nobody expected has a traceback.

    ``job``, ``stage``: what was done, and how far.
    """
    if _has_lost_ranks(error):
        said = (str(error) or repr(error)).splitlines()[0][:200]
        return f"error: another rank has ended or cannot be reached: {said}\n"
    if job is not None and is_out_of_memory(error):
        return f"error: {_memory_line(error, stage, job)}\n"
    if is_expected(error):
        return f"error: {printable(' '.join(str(error).split()))}\n"
    return "".join(traceback.format_exception(error))


def _memory_line(error: BaseException, stage: str, job: jobs.BareJob) -> str:
    """Return the line for ``error``, which a ``job`` met in ``stage``."""
    ways = [way for name, way in _WAYS.items() if getattr(job, name, True) is not True]
    if stage in ("starting", "loading"):
        ways.clear()
    if job.dtype is None and not isinstance(job, jobs.FinetuneJob):  # which trains in float32
        ways.append("--dtype bfloat16")
    if type(job) is jobs.PruneJob and not job.evaluate_on and not job.tasks:
        ways.append("--streamed, which does not load the model")
    notes = [note for note in getattr(error, "__notes__", []) if "\n" not in note]  # no traceback of another rank
    said = ". ".join([(str(error).splitlines() or [repr(error)])[0], *notes[:1]])  # an estimate
    return f"out of memory while {stage}: {said}. Ways out: {', '.join([*ways, 'more ranks'])}"
