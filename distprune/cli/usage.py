"""What is said of words that a command does not take, and what people bring from elsewhere."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from distprune.formatting import printable

UsageError: Any = typer.BadParameter.__mro__[1]  # of click, which typer may bring along as a part of its own

_SHARES = ("--amount", "--ratio", "--prune-ratio", "--pruning-ratio", "--sparsity-ratio", "--target-sparsity")
_COUNTS = ("--n", "--m", "--prunen", "--prunem")
_STAYS = "say what stays: --mlp 0.75, --heads 6, --layers 24, or --parameters 0.8 of all"
_ANY = {
    **dict.fromkeys(("--model", "--model-path", "--model-name-or-path"), "name the model without an option"),
    **dict.fromkeys(("--out", "--output-dir", "--save", "--save-model"), "say --output"),
    **dict.fromkeys(("--nsamples", "--num-samples"), "say --samples"),
    **dict.fromkeys(("--seqlen", "--seq-len", "--max-length"), "say --sequence-length"),
    **dict.fromkeys(("--gpu", "--cuda"), "say --device cuda"),
    **dict.fromkeys(("--force", "--overwrite-output-dir"), "say --overwrite"),
}
# By command: what people bring from elsewhere, and the way to go.
_WAYS: dict[str, dict[str, str]] = {
    "prune": {
        **dict.fromkeys(_SHARES, "say --sparsity 0.5: the final share of zeros"),
        **dict.fromkeys(_COUNTS, "say --pattern 2:4"),
        **dict.fromkeys(("--score", "--pruning-method", "--prune-method"), "say --method"),
        **dict.fromkeys(("--data", "--dataset"), "say --calibration TEXT"),
    },
    "shrink": {
        **dict.fromkeys((*_SHARES, *_COUNTS, "--sparsity", "--pattern"), _STAYS),
        **dict.fromkeys(("--score", "--method", "--pruning-method"), "say --criterion"),
        **dict.fromkeys(("--data", "--dataset"), "say --calibration TEXT"),
    },
    "finetune": {
        **dict.fromkeys(("--lr", "--rate"), "say --learning-rate"),
        **dict.fromkeys(("--epochs", "--num-train-epochs", "--max-steps"), "say --steps or --minutes"),
        **dict.fromkeys(("--bs", "--per-device-train-batch-size"), "say --batch-size, over all ranks"),
        **dict.fromkeys(("--calibration", "--dataset", "--train-file"), "say --data TEXT"),
        **dict.fromkeys((*_SHARES, "--sparsity"), "the zeros that MODEL has are held"),
    },
}


def usage_text(error: Any) -> str:
    """Return what to print of ``error``, a ``UsageError``: one sentence, and where all is said."""
    context = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        return f"{context.get_help()}\n"
    said = error.format_message().replace("Value error, ", "")
    if context is None:
        return f"error: {printable(said)}\n"
    command, flag = context.info_name, getattr(error, "option_name", "")
    if way := (_ANY | _WAYS.get(command, {})).get(flag):
        said = f"{command} takes no {flag}; {way}"
    said = printable(" ".join(said.split()))
    name = context.command_path
    return f"error: {said}\n{inspect.cleandoc(context.get_usage())}\nTry '{name} --help' for help.\n"
