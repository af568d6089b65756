"""What jobs are asked for: dataclasses, whose fields and docstrings say all that the command line needs to know."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import numpy as np
import torch
from typing_extensions import override

from distprune.calibration.own_words import SELF
from distprune.checkpoint.output_lock import RESULT_NAME, unfinished_of
from distprune.checkpoint.outputs import check_output
from distprune.patterns.base import Pattern

REPORT_NAME = "report.json"
# Panels of the help, in their order.
FILES, METHOD, SIZES, CALIBRATION = "Output", "Method", "What stays", "Calibration"
TRAINING, WINDOWS, EVALUATION, PLAN, RUNNING = "Training", "Windows", "Evaluation", "Plan", "Running"
PANELS = (None, FILES, METHOD, SIZES, TRAINING, WINDOWS, CALIBRATION, EVALUATION, PLAN, RUNNING)
MOST = 1 << 30
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_Class = TypeVar("_Class")
_SAID = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)  # of one argument, in a docstring


@dataclass(frozen=True)
class Option:
    """What the command line says of a field, and which values it takes."""

    help: str = ""  # as the docstring of its class says it
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

    def value_of(self, given: Any) -> Any:
        """Return the field's value for what is ``given``: a value, a path, or words as the command line has them.

        Raises:
            ValueError: the words mean no value.
            TypeError: there are other things than words among several.
        """
        given = self._as_text(given) if isinstance(given, str | os.PathLike) else given
        given = given.item() if isinstance(given, np.generic) else given
        if get_origin(self.hint) is tuple and isinstance(given, str | list | tuple):
            words = [given] if isinstance(given, str) else [*given]
            if not all(isinstance(word, str | os.PathLike) for word in words):
                raise TypeError(f"{self.flag} takes texts, not {given!r}")
            words = [self._as_text(word) for word in words]
            return tuple(part for word in words for part in (word.split(self.separator) if self.separator else [word]))
        if not isinstance(given, str):
            return given
        try:
            return self.choices.get(given, given) if self.parse is None else self.parse(given)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"{self.flag} takes {self.metavar}, not {given!r}") from None

    def _as_text(self, word: str | os.PathLike[str]) -> str:
        # A shell leaves --output=~/pruned as it is.
        return os.path.expanduser(word) if self.is_file else os.fspath(word)

    def check(self, name: str, value: Any) -> None:
        """Raise a TypeError or a ValueError if the field ``name`` must not have this ``value``."""
        kind: Any = tuple if get_origin(self.hint) is tuple else self.hint
        is_number = isinstance(value, int) and float in (kind, *get_args(kind))
        is_bool = isinstance(value, bool) and kind is not bool
        if not self.choices and (is_bool or not (is_number or isinstance(value, kind))):
            said = self.hint.__name__ if isinstance(self.hint, type) else self.hint
            raise TypeError(f"{name} ({self.flag}) must be {said}, not {value!r}")
        if self.choices and value not in (self.default, *self.choices.values()):
            raise ValueError(f"{name} ({self.flag}) takes {', '.join(map(repr, self.choices.values()))}, not {value!r}")
        if not isinstance(value, int | float):
            return
        least, most = self.least, self.most
        is_above = self.above is None or self.above < value < inf
        if not (is_above and (least is None or value >= least) and (most is None or value <= most)):
            limits = {"above": self.above, "at least": least, "at most": most}
            said = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
            said += " and finite" if most is None and self.above is not None else ""
            raise ValueError(f"{name} ({self.flag}) takes a number {said}, not {value}")


def ask(*, default: Any = MISSING, **more: Any) -> Any:
    """Return a field with its :class:`Option`: ``steps: int = ask(default=1, least=1)``.

    Its help is what the docstring of its class says under ``Args:``.
    """
    return field(default=default, metadata={"option": Option(**more)})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(ask,))
def asked(cls: type[_Class]) -> type[_Class]:
    """Make ``cls`` a frozen dataclass of fields by :func:`ask`, which take what :meth:`Option.value_of` does."""
    cls.__post_init__ = _take_words  # type: ignore[attr-defined]
    return dataclass(frozen=True, kw_only=True)(cls)


def _take_words(job: Any) -> None:
    for name, option in options_of(type(job)).items():
        object.__setattr__(job, name, option.value_of(getattr(job, name)))


def options_of(job: Any) -> Mapping[str, Option]:
    """Return the options of a class of ``ask`` by its fields, with their help, flags, types, defaults and choices."""
    options, hints, said = dict[str, Option](), get_type_hints(job), dict[str, str]()
    for base in reversed(job.__mro__):
        said |= _SAID.findall(inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2])
    for declared in fields(job):
        name, option = declared.name, declared.metadata["option"]
        hint, flag = hints[name], option.flag or f"--{name.replace('_', '-')}"
        parts = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        choices = option.choices or {value: value for part in parts for value in get_args(part)}
        option = replace(option, flag=flag, hint=hint, default=declared.default, choices=choices)
        for number, metavar in ((int, "INTEGER"), (float, "NUMBER")):
            if option.parse is None and number in (hint, *get_args(hint)):
                option = replace(option, parse=number, metavar=metavar)
        options[name] = replace(option, help=" ".join(said[name].split()))
    return options


def check_fields(job: Any) -> None:
    """Raise a TypeError or a ValueError if a field of ``job`` must not have its value. Local."""
    for name, option in options_of(type(job)).items():
        option.check(name, getattr(job, name))


def parse_amount(text: str, units: str, factor: int) -> int:
    """Return the number that a text such as 80G means: each of the ``units`` is ``factor`` times the one before."""
    power = units.find(text[-1:]) + 1
    return int(Fraction(text[:-1] if power else text) * factor**power)


def parse_size(text: str) -> int | float:
    """Return how many are to stay, or which share of them, which has a point."""
    size: int | float = float(text) if "." in text else int(text)
    if not 0 < size <= (1 if isinstance(size, float) else MOST):
        raise ValueError(f"{text} is neither a number from 1 on nor a share above 0 and at most 1.0")
    return size


@asked
class BareJob:
    """What every job is asked for; all ranks must ask for the same.

    Args:
        model: A Hugging Face directory, or an id of the hub: org/name or org/name@revision.
        output: Directory to write, which all ranks see. It must not exist, or be empty.
        seed: Draws windows of text, own words, and the zeros of --method random.
        dtype: Of the weights that are written. auto: as they are stored.
        overwrite: Replace the model in the output directory.
    """

    model: str = ask(is_file=True)
    output: str = ask(is_file=True, panel=FILES)
    seed: int = ask(default=0, least=-(1 << 63), most=(1 << 63) - 1, panel=RUNNING)
    dtype: torch.dtype | None = ask(default=None, choices=DTYPES, panel=FILES)
    overwrite: bool = ask(default=False, decides=False, panel=FILES)

    def arguments(self) -> dict[str, Any]:
        """Return all fields as JSON carries them."""
        return {name: repr(of) if isinstance(of, torch.dtype | Pattern) else of for name, of in vars(self).items()}

    def asked_of(self, call: Callable[..., Any]) -> dict[str, Any]:
        """Return the fields that ``call`` takes as arguments: a job and a call have one grammar.

        But for the model and the samples, which a job names, and a call is given.
        """
        names = inspect.signature(call).parameters.keys() - {"model", "samples"}
        return {name: value for name, value in vars(self).items() if name in names}

    def flags(self, *, deciding: bool = False) -> dict[str, Any]:
        """Return :meth:`arguments` under the names of the command line, for the ranks to agree on.

        ``deciding``: those alone that decide what comes out, for which a resumed job must be asked again; a path may be
        spelled otherwise then.
        """
        options, values = options_of(type(self)), self.arguments()
        if not deciding:
            return {option.flag: values[name] for name, option in options.items()}
        for name in (name for name, option in options.items() if option.is_file and isinstance(values[name], str)):
            if values[name] != SELF and (name == "output" or os.path.exists(values[name])):  # else it is no path
                values[name] = os.path.realpath(values[name])
        return {option.flag: values[name] for name, option in options.items() if option.decides}

    def check_asked(self) -> None:
        """Raise a TypeError or a ValueError for what is wrong whatever the model and the files are. Local."""
        check_fields(self)

    def check_given(self, names: Collection[str]) -> None:
        """Raise a ValueError for one of ``names``, fields that a command line gives, that says nothing here. Local."""

    def check(self, *inputs: Path) -> Path:
        """Return where the output is; raise what can be known to be wrong before anything is read. Local.

        ``inputs``: what is read, beside what the job names.
        """
        self.check_asked()
        return check_output(self.output, overwrite=self.overwrite, inputs=[*self.inputs(), *inputs])

    def inputs(self) -> list[str]:
        """Return the files and directories that the job names and reads: the output must not replace them."""
        files = [name for name, option in options_of(type(self)).items() if option.is_file]
        values = [getattr(self, name) for name in files if name != "output"]
        paths = [path for value in values for path in (value if isinstance(value, tuple) else [value])]
        return [path for path in paths if isinstance(path, str) and path != SELF]


@asked
class Job(BareJob):
    """A job that writes a model, and can go on where it was killed.

    Args:
        evaluate_on: Text or JSON-lines file. Report the perplexity before and after. Repeatable.
        evaluation_tokens: How much of each to use.
        evaluation_length: Tokens in one window.
        tasks: Tasks of lm-eval, such as hellaswag,arc_easy: report them before and after.
        resume: Go on where a job that was killed has stopped.
    """

    evaluate_on: tuple[str, ...] = ask(default=(), flag="--eval", is_file=True, decides=False, panel=EVALUATION)
    evaluation_tokens: int = ask(
        default=8192, flag="--eval-tokens", least=2, most=MOST, needs=("evaluate_on",), decides=False, panel=EVALUATION
    )
    evaluation_length: int = ask(
        default=512, flag="--eval-length", least=2, most=MOST, needs=("evaluate_on",), decides=False, panel=EVALUATION
    )
    tasks: tuple[str, ...] = ask(default=(), metavar="NAMES", separator=",", decides=False, panel=EVALUATION)
    resume: bool = ask(default=False, decides=False, panel=RUNNING)

    @override
    def check_asked(self) -> None:
        super().check_asked()
        if self.evaluate_on and self.evaluation_tokens < self.evaluation_length:
            raise ValueError(
                f"evaluation_tokens={self.evaluation_tokens} (--eval-tokens) are less than one window of "
                f"{self.evaluation_length} (--eval-length)"
            )

    @override
    def check(self, *inputs: Path) -> Path:
        target = Path(os.path.realpath(self.output))
        is_finished = bool(self.output and target.name) and (target / REPORT_NAME).is_file()
        if self.resume and not self.overwrite and is_finished and not (unfinished_of(target) / RESULT_NAME).exists():
            raise FileExistsError(f"nothing is left to resume: {self.output} is finished, it holds a {REPORT_NAME}")
        return super().check(*inputs)


@asked
class PruningJob(Job):
    """What a job that prunes is asked for beside that.

    Args:
        sparsity: The final share of zeros, such as 0.5. Existing zeros count toward it.
        pattern: unstructured, row or block:16, with --sparsity; or N:M such as 2:4, without.
    """

    sparsity: float | None = ask(default=None, panel=METHOD)
    pattern: Pattern | str = ask(default="unstructured", parse=str, metavar="TEXT", panel=METHOD)
