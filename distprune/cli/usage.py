"""What is said of words that a command does not take, and what people bring from elsewhere."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from distprune.formatting import printable

UsageError: Any = typer.BadParameter.__mro__[1]  # of click, which typer may bring along as a part of its own

_STAYS = "say what stays: --mlp 0.75, --heads 6, --layers 24, or --parameters 0.8 of all"
_SHARES = "--amount --ratio --prune-ratio --pruning-ratio --sparsity-ratio --target-sparsity"
# What people bring from elsewhere: commands, their options there, and the way to go.
_WAYS = (
    ("prune", _SHARES, "say --sparsity 0.5: the final share of zeros"),
    ("prune", "--n --m --prunen --prunem", "say --pattern 2:4"),
    ("prune", "--score --pruning-method --prune-method", "say --method"),
    ("shrink", f"{_SHARES} --sparsity --pattern", _STAYS),
    ("shrink", "--score --method --pruning-method", "say --criterion"),
    ("prune shrink", "--data --dataset", "say --calibration TEXT"),
    ("finetune", "--lr --rate", "say --learning-rate"),
    ("finetune", "--epochs --num-train-epochs --max-steps", "say --steps or --minutes"),
    ("finetune", "--bs --per-device-train-batch-size", "say --batch-size, over all ranks"),
    ("finetune", "--calibration --dataset --train-file", "say --data TEXT"),
    ("finetune", f"{_SHARES} --sparsity", "the zeros that MODEL has are held"),
    ("", "--model --model-path --model-name-or-path", "name the model without an option"),
    ("", "--out --output-dir --save --save-model", "say --output"),
    ("", "--nsamples --num-samples", "say --samples"),
    ("", "--seqlen --seq-len --max-length", "say --sequence-length"),
    ("", "--gpu --cuda", "say --device cuda"),
    ("", "--force --overwrite-output-dir", "say --overwrite"),
)


def usage_text(error: Any) -> str:
    """Return what to print of ``error``, a ``UsageError``: one sentence, and where all is said."""
    context = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        return f"{context.get_help()}\n"
    said = error.format_message().replace("Value error, ", "")
    if context is None:
        return f"error: {printable(said)}\n"
    command, flag = context.info_name, getattr(error, "option_name", "")
    for commands, flags, way in _WAYS:
        if flag in flags.split() and (not commands or command in commands.split()):
            said = f"{command} takes no {flag}; {way}"
    said = printable(" ".join(said.split()))
    name = context.command_path
    return f"error: {said}\n{inspect.cleandoc(context.get_usage())}\nTry '{name} --help' for help.\n"
