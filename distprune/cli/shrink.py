"""The command ``distprune shrink``."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

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
    Tasks,
    Timeout,
    common_fields,
    number_of_samples,
    request_of,
)
from distprune.jobs import ShrinkJob
from distprune.oneshot import TargetsOf
from distprune.removal import CriterionName, ExpertCriterion, LayerCriterion, Refit

__all__ = ["shrink"]

_SIZE = "N|SHARE"
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_PARAMETERS = 10**15


def _size(text: str, most: int = MOST_TOKENS) -> int | float:
    """Return how many are to stay, or which share of them, which has a point."""
    try:
        size: int | float = float(text) if "." in text else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number such as 6 nor a share such as 0.75") from None
    if not (0 < size <= 1 if isinstance(size, float) else 1 <= size <= most):
        raise typer.BadParameter(f"{text} is neither a number from 1 on nor a share above 0 and at most 1.0")
    return size


def _budget(text: str) -> int | float:
    """Return how many parameters may stay, such as 100M, or which share of them."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT])", text)
    if found is None and not re.fullmatch(r"[0-9.]+", text):
        raise typer.BadParameter(f"{text!r} is neither a number such as 100M or 100000000 nor a share such as 0.8")
    return _size(text, _MOST_PARAMETERS) if found is None else int(Decimal(found[1]) * _FACTORS[found[2]]) or 1


def shrink(
    context: typer.Context,
    model: Model,
    output: Output,
    calibration: Annotated[
        Path, typer.Option(help="Text or JSON-lines file. What stays is chosen, and refitted, with this text.")
    ],
    mlp: Annotated[
        float | None, typer.Option(parser=_size, metavar=_SIZE, help="MLP channels that stay, such as 0.75 of them.")
    ] = None,
    heads: Annotated[
        float | None,
        typer.Option(parser=_size, metavar=_SIZE, help="Query heads that stay, as many of each KV group."),
    ] = None,
    kv_groups: Annotated[
        float | None,
        typer.Option(parser=_size, metavar=_SIZE, help="KV heads that stay, each with its query heads."),
    ] = None,
    experts: Annotated[
        float | None, typer.Option(parser=_size, metavar=_SIZE, help="Experts that stay of each mixture.")
    ] = None,
    layers: Annotated[
        float | None, typer.Option(parser=_size, metavar=_SIZE, help="Decoder layers that stay, such as 24.")
    ] = None,
    parameters: Annotated[
        float | None,
        typer.Option(
            parser=_budget,
            metavar="N[K|M|B]|SHARE",
            help="At most as many parameters stay, such as 100M. What leaves, of all of which nothing is said but "
            "experts, is found by trials on --calibration.",
        ),
    ] = None,
    criterion: Annotated[
        CriterionName, typer.Option(help="How units are chosen. obs: by what the least squares fit of the rest loses.")
    ] = "obs",
    layer_criterion: Annotated[
        LayerCriterion,
        typer.Option(help="How layers are chosen. loss: one by one, by the loss without each; influence: by angles."),
    ] = "loss",
    expert_criterion: Annotated[
        ExpertCriterion,
        typer.Option(help="How experts are chosen. output: by what they put out; usage: by how many tokens they get."),
    ] = "output",
    refit: Annotated[
        Refit,
        typer.Option(help="What becomes of the layers that read what goes: fitted anew, their bias alone, or none."),
    ] = "least_squares",
    targets: Annotated[
        TargetsOf | None,
        typer.Option(help="Fit to each layer's own output (the default for heads), or the dense model's."),
    ] = None,
    target_share: Annotated[float, typer.Option(help="How much of the way to the dense model's output.")] = 0.5,
    samples: Annotated[
        int, typer.Option(parser=number_of_samples, metavar="N|all", help="Calibration windows, drawn by --seed.")
    ] = "128",  # type: ignore[assignment]  # parsed, too
    sequence_length: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Tokens in each.")] = 2048,
    seed: Annotated[int, typer.Option(help="To draw --calibration windows.")] = 0,
    offload: Annotated[bool, typer.Option(help="Keep activations on the CPU between blocks.")] = False,
    speed: Annotated[
        bool,
        typer.Option(help="Measure tokens per second and memory before and after; both models must fit on one rank."),
    ] = True,
    resume: Annotated[bool, typer.Option(help="Go on where a job that was killed has stopped.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    overwrite: Overwrite = False,
    evaluate_on: EvaluateOn = None,
    eval_tokens: EvalTokens = 8192,
    eval_length: EvalLength = 512,
    tasks: Tasks = None,
    timeout: Timeout = 600,
) -> None:
    """Make MODEL smaller, by what is said to stay, and write it to --output. Start it as prune.

    A size is a number, such as 6, or a share, such as 0.75. --parameters is divided over the sizes that are not said.
    """
    job = ShrinkJob(
        **common_fields(locals()),
        mlp=mlp,
        heads=heads,
        kv_groups=kv_groups,
        experts=experts,
        layers=layers,
        parameters=parameters,
        calibration=str(calibration),
        criterion=criterion,
        layer_criterion=layer_criterion,
        expert_criterion=expert_criterion,
        refit=refit,
        targets=targets,
        target_share=target_share,
        samples=samples or None,
        sequence_length=sequence_length,
        offload=offload,
        speed=speed,
        resume=resume,
    )
    try:
        job.sizes.check_asked()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    context.obj(request_of(job, device, timeout))
