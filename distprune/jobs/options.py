"""What jobs are asked for: dataclasses, whose fields say all that the command line needs to know of an option."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from decimal import Decimal
from math import inf
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import torch

from distprune.checkpoint.replaceable import check_output
from distprune.patterns.base import Pattern

# Panels of the help, in their order.
FILES, METHOD, SIZES, CALIBRATION = "Output", "Method", "What stays", "Calibration"
TRAINING, WINDOWS, EVALUATION, PLAN, RUNNING = "Training", "Windows", "Evaluation", "Plan", "Running"
PANELS = (None, FILES, METHOD, SIZES, TRAINING, WINDOWS, CALIBRATION, EVALUATION, PLAN, RUNNING)
_Class = TypeVar("_Class")
MOST = 1 << 30
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Option:
    """What the command line says of a field, and which values it takes."""

    help: str
    flag: str = ""  # if it is not the field's name
    hint: Any = None  # the field's type
    default: Any = None  # of the field
    least: float | None = None
    most: float | None = None
    above: float | None = None  # and finite
    choices: Mapping[str, Any] = field(default_factory=dict)  # what each word stands for; of a ``Literal`` itself
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    separator: str | None = None  # of several values in one word
    needs: tuple[str, ...] = ()  # it says something only where one of these fields is set
    is_file: bool = False  # and its path is not shown in the card
    decides: bool = True  # what comes out: a resumed job must be asked for the same, and the card names it
    panel: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise a ValueError if the field ``name`` must not have this ``value``."""
        values = self.choices.values()
        if values and value not in (self.default, *values):
            raise ValueError(f"{name} ({self.flag}) takes {', '.join(map(repr, values))}, not {value!r}")
        is_within = (
            value is None
            or isinstance(value, str)
            or (
                (self.above is None or self.above < value < inf)
                and (self.least is None or value >= self.least)
                and (self.most is None or value <= self.most)
            )
        )
        if not is_within:
            limits = {"above": self.above, "at least": self.least, "at most": self.most}
            said = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
            said += " and finite" if self.most is None and self.above is not None else ""
            raise ValueError(f"{name} ({self.flag}) takes a number {said}, not {value}")


def ask(help: str, *, default: Any = MISSING, **of: Any) -> Any:
    """Return a field with its :class:`Option`: ``steps: int = ask("How many.", default=1, least=1)``."""
    return field(default=default, metadata={"option": Option(help, **of)})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(ask,))
def asked(cls: type[_Class]) -> type[_Class]:
    """Make ``cls`` a frozen dataclass of fields by :func:`ask`."""
    return dataclass(frozen=True, kw_only=True)(cls)


def options_of(job: Any) -> Mapping[str, Option]:
    """Return the options of a class of ``ask`` by its fields, with their flags, types, defaults and choices."""
    found, hints = dict[str, Option](), get_type_hints(job)
    for of in fields(job):
        option: Option = of.metadata["option"]
        hint, flag = hints[of.name], option.flag or f"--{of.name.replace('_', '-')}"
        parts = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        choices = option.choices or {value: value for part in parts for value in get_args(part)}
        found[of.name] = replace(option, flag=flag, hint=hint, default=of.default, choices=choices)
    return found


def check_fields(job: Any) -> None:
    """Raise a ValueError if a field of ``job`` must not have its value. Local."""
    for name, option in options_of(type(job)).items():
        option.check(name, getattr(job, name))


def parse_samples(text: str) -> int | None:
    """Return how many windows are meant; ``None``: all."""
    if text == "all":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MOST:
        raise ValueError(f"{text!r} is neither 'all' nor a number from 1 to {MOST}")
    return int(text)


def parse_size(text: str, most: int = MOST) -> int | float:
    """Return how many are to stay, or which share of them, which has a point."""
    try:
        size: int | float = float(text) if "." in text else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither a number such as 6 nor a share such as 0.75") from None
    if not (0 < size <= 1 if isinstance(size, float) else 1 <= size <= most):
        raise ValueError(f"{text} is neither a number from 1 on nor a share above 0 and at most 1.0")
    return size


def parse_budget(text: str) -> int | float:
    """Return how many parameters may stay, such as 100M, or which share of them."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMBT])", text)
    if found is None and not re.fullmatch(r"[0-9.]+", text):
        raise ValueError(f"{text!r} is neither a number such as 100M or 100000000 nor a share such as 0.8")
    return parse_size(text, 10**15) if found is None else int(Decimal(found[1]) * _FACTORS[found[2]]) or 1


def parse_bytes(text: str) -> int:
    """Return how many bytes are meant, such as 80G: K, M, G and T are powers of 1,024."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)", text)
    if found is None or not (num := int(Decimal(found[1]) * 1024 ** " KMGT".index(found[2] or " "))):
        raise ValueError(f"{text!r} is not a number of bytes such as 80G")
    return num


def _ask_of_evaluation(help: str, flag: str, default: int) -> Any:
    """Return a field that says something only beside ``--eval``: a number of tokens."""
    return ask(
        help, default=default, flag=flag, least=2, most=MOST, needs=("evaluate_on",), decides=False, panel=EVALUATION
    )


@asked
class BareJob:
    """What every job is asked for; all ranks must ask for the same. ``distprune COMMAND --help`` says what it means."""

    model: str = ask("A Hugging Face directory, or an id of the hub: org/name or org/name@revision.", is_file=True)
    output: str = ask(
        "Directory to write, which all ranks see. It must not exist, or be empty.", is_file=True, panel=FILES
    )
    seed: int = ask(
        "Draws windows of text, own words, and the zeros of --method random.",
        default=0,
        least=-(1 << 63),
        most=(1 << 63) - 1,
        panel=RUNNING,
    )
    dtype: torch.dtype | None = ask(
        "Of the weights that are written. auto: as they are stored.", default=None, choices=DTYPES, panel=FILES
    )
    overwrite: bool = ask("Replace the model in the output directory.", default=False, decides=False, panel=FILES)

    def arguments(self) -> dict[str, Any]:
        """Return all fields as JSON carries them."""
        return {name: repr(of) if isinstance(of, torch.dtype | Pattern) else of for name, of in vars(self).items()}

    def flags(self) -> dict[str, Any]:
        """Return :meth:`arguments` under the names of the command line, for the ranks to agree on."""
        options = options_of(type(self))
        return {options[name].flag: value for name, value in self.arguments().items()}

    def facts(self) -> dict[str, Any]:
        """Return those of :meth:`flags` that decide what comes out: a resumed job must be asked for the same."""
        deciding = {option.flag for option in options_of(type(self)).values() if option.decides}
        return {flag: value for flag, value in self.flags().items() if flag in deciding}

    def check_asked(self) -> None:
        """Raise a ValueError for what is wrong whatever the model and the files are. Local."""
        check_fields(self)


@asked
class Job(BareJob):
    """A job that writes a model."""

    has_picture: ClassVar[bool] = True  # whether what it did can be drawn

    evaluate_on: tuple[str, ...] = ask(
        "Text or JSON-lines file. Report the perplexity before and after. Repeatable.",
        default=(),
        flag="--eval",
        is_file=True,
        decides=False,
        panel=EVALUATION,
    )
    evaluation_tokens: int = _ask_of_evaluation("How much of each to use.", "--eval-tokens", 8192)
    evaluation_length: int = _ask_of_evaluation("Tokens in one window.", "--eval-length", 512)
    tasks: tuple[str, ...] = ask(
        "Tasks of lm-eval, such as hellaswag,arc_easy: report them before and after.",
        default=(),
        metavar="NAMES",
        separator=",",
        is_file=True,
        decides=False,
        panel=EVALUATION,
    )

    def check(self) -> None:
        """Raise what can be known to be wrong before anything is read. Local."""
        self.check_asked()
        check_output(self.output, overwrite=self.overwrite, inputs=self.inputs())

    def inputs(self) -> list[str]:
        """Return the files and directories that are read, which the output must not replace."""
        return [self.model, *self.evaluate_on]


@asked
class PruningJob(Job):
    """What a job that prunes is asked for beside that."""

    sparsity: float | None = ask(
        "The final share of zeros, such as 0.5. Existing zeros count toward it.", default=None, panel=METHOD
    )
    method: str = ask("How weights are chosen.", panel=METHOD)
    pattern: Pattern | str = ask(
        "unstructured, row or block:16, with --sparsity; or N:M such as 2:4, without.",
        default="unstructured",
        parse=str,
        metavar="TEXT",
        panel=METHOD,
    )
