"""What is said of words that a command does not take: in one sentence what it takes, and the way to go."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from typing import Any

import typer

from distprune.formatting import printable

UsageError: Any = typer.BadParameter.__mro__[1]  # of click, which typer may bring along as a part of its own

_PERCENT = re.compile(r"([0-9.]+) ?%")
_EXTRA = re.compile(r"unexpected extra arguments?(?:\(s\))? \((.*)\)")
_SHARES = ("--amount", "--ratio", "--prune-ratio", "--pruning-ratio", "--sparsity-ratio", "--target-sparsity")
_COUNTS = ("--n", "--m", "--prunen", "--prunem")
_STAYS = "say what stays: --mlp 0.75, --heads 6, --layers 24, or --parameters 0.8 of all"
# What people bring from elsewhere, by command and option; "": in any command.
_WAYS: dict[str, dict[str, str]] = {
    "": {
        **dict.fromkeys(("--model", "--model-path", "--model-name-or-path"), "name the model without an option"),
        **dict.fromkeys(("--out", "--output-dir", "--save", "--save-model"), "say --output"),
        **dict.fromkeys(("--nsamples", "--num-samples"), "say --samples"),
        **dict.fromkeys(("--seqlen", "--seq-len", "--max-length"), "say --sequence-length"),
        **dict.fromkeys(("--gpu", "--cuda"), "say --device cuda"),
        **dict.fromkeys(("--force", "--overwrite-output-dir"), "say --overwrite"),
    },
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

_SAME = {"gpu": "cuda", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "l1": "magnitude"}


def number_parser(flag: str, kind: type[int] | type[float], limits: Sequence[float | None]) -> Callable[[Any], Any]:
    """Return what reads the number that ``flag`` takes; ``limits``: at least, at most, and above which."""
    least, most, above = limits
    bounds = [f"{word} {limit}" for word, limit in (("from", least), ("above", above)) if limit is not None]
    if most is not None:
        bounds.append(f"{'to' if least is not None else 'and at most'} {most}")
    said = " ".join(["a whole number" if kind is int else "a number" if bounds else "a number such as 0.5", *bounds])

    def parse(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        try:
            number = kind(text)
        except ValueError:
            raise UsageError(f"{flag} takes {said}, not {text!r}{_meant(text, kind)}") from None
        is_within = (least is None or number >= least) and (most is None or number <= most)
        if not is_within or (above is not None and not (number > above and isfinite(number))):
            raise UsageError(f"{flag} takes {said}, not {text}")
        return number

    return parse


def _meant(text: str, kind: type[int] | type[float]) -> str:
    """Return what to say of the number that ``text`` may mean."""
    try:
        percent = _PERCENT.fullmatch(text)
        number = float(percent[1]) / 100 if percent else float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return ""
    return f"; did you mean {number:.15g}?" if kind is float or number.is_integer() else ""


def word_parser(flag: str, words: Sequence[str]) -> Callable[[Any], Any]:
    """Return what reads one of the ``words`` that ``flag`` takes."""

    def parse(text: Any) -> Any:
        if isinstance(text, str) and text not in words:
            near = _SAME.get(text.lower(), text.lower())
            close = get_close_matches(near, words, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"{flag} takes {_either(words)}, not {text!r}{meant}")
        return text

    return parse


def own_parser(flag: str, parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return ``parse`` with its errors as typer's; defaults are values already."""

    def parsed(text: Any) -> Any:
        try:
            return parse(text) if isinstance(text, str) else text
        except ValueError as error:
            raise UsageError(f"{flag}: {error}") from None

    return parsed


def usage_text(error: Any, commands: Mapping[str, Any]) -> str:
    """Return what to print of ``error``, a ``UsageError``: one sentence, and where all is said.

    ``commands``: all of them, by name.
    """
    context = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        return f"{context.get_help()}\n"
    said = printable(" ".join(_sentence(error, commands).split()))
    if context is None:
        return f"error: {said}\n"
    name = context.command_path
    return f"error: {said}\n{inspect.cleandoc(context.get_usage())}\nTry '{name} --help' for help.\n"


def _sentence(error: Any, commands: Mapping[str, Any]) -> str:
    kind, command = type(error).__name__, "" if error.ctx is None else str(error.ctx.info_name)
    if kind == "NoSuchOption":
        flag = str(error.option_name)
        return f"{command} takes no {flag}; {_way(flag, command, commands)}"
    if kind == "MissingParameter":
        param = error.param
        name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper()
        return f"{command} needs {name}: {getattr(param, 'help', None) or 'see --help'}"
    if kind == "BadOptionUsage":
        return f"{error.option_name} needs a value behind it"
    if found := _EXTRA.search(str(error.message)):
        return f"{command} does not take {found[1]!r} here; names of options begin with --"
    return str(error.message if error.message.startswith("--") else error.format_message())


def _way(flag: str, command: str, commands: Mapping[str, Any]) -> str:
    for ways in (_WAYS.get(command, {}), _WAYS[""]):
        if flag in ways:
            return ways[flag]
    flags = {name: _flags(of) for name, of in commands.items()}
    if close := get_close_matches(flag, flags.get(command, []), n=1, cutoff=0.75):
        return f"did you mean {close[0]}?"
    others = [name for name, of_other in flags.items() if flag in of_other]
    return f"{_either(others)} does" if others else f"distprune {command} --help says what it takes"


def _flags(command: Any) -> list[str]:
    return [flag for param in command.params for flag in (*param.opts, *param.secondary_opts) if flag.startswith("--")]


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last
