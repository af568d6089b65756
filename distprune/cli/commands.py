"""Commands that run jobs. Their options are the fields of the jobs' dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, TypeAlias, get_args, get_origin

import typer

from distprune.cli.usage import UsageError, number_parser, own_parser, word_parser
from distprune.cli.wording import worded
from distprune.jobs import BareJob, StreamedJob
from distprune.jobs.options import PANELS, RUNNING, Option, options_of

_LONGEST_TIMEOUT = 10**6  # seconds; torch counts milliseconds in 32 bits in places
_Options: TypeAlias = Mapping[str, Mapping[str, Option]]  # by flag and field; see add_command
_NUMBERS = {int: "INTEGER", float: "NUMBER"}
_DEVICES = ("auto", "cpu", "cuda")
_NAMED = inspect.Parameter.KEYWORD_ONLY
_DEVICE = Annotated[
    str,
    typer.Option(
        help="auto: CUDA where there is a GPU.",
        metavar=f"[{'|'.join(_DEVICES)}]",
        parser=word_parser("--device", _DEVICES),
        rich_help_panel=RUNNING,
    ),
]
_TIMEOUT = Annotated[
    float,
    typer.Option(
        help="Seconds a rank waits for the others.",
        metavar=_NUMBERS[float],
        parser=number_parser("--timeout", float, (1, _LONGEST_TIMEOUT, None)),
        rich_help_panel=RUNNING,
    ),
]
_VERBOSE = Annotated[
    bool,
    typer.Option("--verbose", help="Print all of the report, not its summary alone.", rich_help_panel=RUNNING),
]


@dataclass(frozen=True)
class JobCommand:
    """A job, where to run it, and whether to print all of its report."""

    job: BareJob
    device: str
    timeout: float
    verbose: bool = False


def add_command(
    app: typer.Typer, name: str, help: str, kinds: Mapping[str, type[BareJob]], examples: Sequence[str]
) -> None:
    """Add a command that gives a :class:`JobCommand` to the context's ``obj``; its help ends with ``examples``. Local.

    ``kinds``: the job that is meant where an option is given, by the option's flag; ``""``: by default. A value
    that the default job does not take stands for the option of the last one that does.
    """

    options = {flag: options_of(kind) for flag, kind in kinds.items()}

    def start(context: typer.Context, device: str, timeout: float, verbose: bool, **values: Any) -> None:
        sources = {key: context.get_parameter_source(key) for key in values}
        given = {key: values[key] for key, source in sources.items() if source and source.name != "DEFAULT"}
        job = _job_of(kinds, options, given)
        if isinstance(job, StreamedJob):
            if device == "cuda":
                raise UsageError("--streamed runs on the CPU; leave out --device")
            device = "cpu"
        context.obj(JobCommand(job, device, timeout, verbose))

    own = [inspect.Parameter("context", _NAMED, annotation=typer.Context)]
    own += [_parameter(name, options) for name in _names(options.values())]
    own.append(inspect.Parameter("device", _NAMED, annotation=_DEVICE, default="auto"))
    own.append(inspect.Parameter("timeout", _NAMED, annotation=_TIMEOUT, default=600.0))
    own.append(inspect.Parameter("verbose", _NAMED, annotation=_VERBOSE, default=False))
    start.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    app.command(name, help=help, epilog=as_epilog(examples))(start)


def as_epilog(examples: Sequence[str]) -> str:
    """Return what typer prints as one line for each of ``examples``."""
    return "\n\n".join(["Examples:", *examples])


def _kind_of(options: _Options, given: Mapping[str, Any]) -> str:
    """Return the flag of the job that the options that were ``given`` ask for."""
    flags = {option.flag for of_kind in options.values() for key, option in of_kind.items() if key in given}
    if asked := next((flag for flag in options if flag in flags), ""):
        return asked
    for key, value in given.items():
        taking = [flag for flag, of in options.items() if key in of and of[key].choices and value in of[key].choices]
        if taking and key in options[""] and "" not in taking:
            return taking[-1]
    return ""


def _job_of(kinds: Mapping[str, type[BareJob]], options: _Options, given: Mapping[str, Any]) -> BareJob:
    """Return the job that the options that were ``given`` ask for.

    Raises:
        UsageError: options that do not go together, or values that no job takes.
    """
    flags = {key: option.flag for of_kind in options.values() for key, option in of_kind.items()}
    asked = _kind_of(options, given)
    own = options[asked]
    for key, value in given.items():
        having = [flag for flag, of_kind in options.items() if key in of_kind]
        said = flags[key]
        if key in own and own[key].choices and value not in own[key].choices:
            said = f"{said} {value}"
            having = [flag for flag in having if value in options[flag][key].choices]
        if asked not in having:
            goes = f"goes with {' or '.join(having)}" if not asked else f"does not go with {asked}"
            raise UsageError(f"{said} {goes}")
        if (needs := own[key].needs) and not any(given.get(needed) for needed in needs):
            raise UsageError(f"{said} goes with {' or '.join(flags[needed] for needed in needs)}")
    try:
        job = kinds[asked](**{key: _value(own[key], value) for key, value in given.items()})
        job.check_asked()
    except ValueError as error:
        raise UsageError(worded(str(error), own, [str(value) for value in given.values()])) from None
    return job


def _needs(flag: str, options: _Options) -> tuple[str, ...]:
    """Return what the option needs that asks for a kind of jobs."""
    return next((option.needs for option in options[flag].values() if option.flag == flag), ())


def _value(option: Option, given: Any) -> Any:
    """Return the value of a field, of what typer makes of the words."""
    if get_origin(option.hint) is tuple:
        return tuple(part for word in given for part in (word.split(option.separator) if option.separator else [word]))
    return option.choices[given] if option.choices else given


def _names(options: Iterable[Mapping[str, Option]]) -> list[str]:
    """Return the fields of all kinds, panel by panel."""
    panels = {name: option.panel for of_kind in options for name, option in of_kind.items()}
    return sorted(panels, key=lambda name: PANELS.index(panels[name]))


def _parameter(name: str, options: _Options) -> inspect.Parameter:
    """Return the parameter of which typer makes the option; where jobs differ, with all choices and no default."""
    having = {flag: of_kind[name] for flag, of_kind in options.items() if name in of_kind}
    # What is asked of a job that goes with the option of another is said of that one.
    having = {flag: of for flag, of in having.items() if not _needs(flag, options)} or having
    option = next(iter(having.values()))
    words = tuple(dict.fromkeys(word for of_kind in having.values() for word in of_kind.choices))
    parts = {option.hint, *get_args(option.hint)}
    hint: Any = str if words else next((of for of in (bool, int, float) if of in parts), str)
    default = option.default
    shown: bool | str = True
    parse, metavar = None, option.metavar or ("PATH" if option.is_file else None)
    if option.parse is not None:
        parse = own_parser(option.flag, option.parse)
    elif words:
        parse, metavar = word_parser(option.flag, words), f"[{'|'.join(words)}]"
    elif hint in (int, float):
        parse, metavar = number_parser(option.flag, hint, (option.least, option.most, option.above)), _NUMBERS[hint]
    if option.flag in options:
        default = False if hint is bool else None
    elif others := {flag: of_kind.default for flag, of_kind in having.items() if of_kind.default != default}:
        shown = ", ".join([str(default), *(f"{other} with {flag}" for flag, other in others.items())])
        default = None
    elif get_origin(option.hint) is tuple:
        hint, default = list[str], None
    elif words:
        default = next((word for word, value in option.choices.items() if value == default), None)
    on_or_off = f"/--no-{option.flag.removeprefix('--')}" if hint is bool and option.flag not in options else ""
    goes_with = "" if "" in having or option.flag in options else f" Only with {' or '.join(having)}."
    if name == "model":
        annotation: Any = Annotated[str, typer.Argument(help=option.help, metavar=name.upper())]
    else:
        annotation = Annotated[
            hint | None if default is None else hint,
            typer.Option(
                option.flag + on_or_off,
                help=option.help + goes_with,
                metavar=metavar,
                parser=parse,
                rich_help_panel=option.panel,
                show_default=shown,
            ),
        ]
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, _NAMED, annotation=annotation, default=default)
