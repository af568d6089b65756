"""Commands that run jobs. Their options are the fields of the jobs' dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from distprune.cli.usage import UsageError
from distprune.jobs import BareJob
from distprune.jobs.options import PANELS, RUNNING, Option, ask, asked, check_fields, options_of


@asked
class Running:
    """How a job is run.

    Args:
        device: auto: CUDA where there is a GPU.
        timeout: Seconds a rank waits for the others.
    """

    device: Literal["auto", "cpu", "cuda"] = ask(default="auto", panel=RUNNING)
    # Torch counts milliseconds in 32 bits in places.
    timeout: float = ask(default=600.0, least=1, most=10**6, panel=RUNNING)


@dataclass(frozen=True)
class JobCommand:
    """A job, and how to run it."""

    job: BareJob
    running: Running = field(default_factory=Running)


def add_command(
    app: typer.Typer,
    name: str,
    help: str,
    kinds: Mapping[str, type[BareJob]],
    examples: Sequence[str],
    kind_of: Callable[[Mapping[str, Any]], str] = lambda _: "",
) -> None:
    """Add a command that gives a :class:`JobCommand` to the context's ``obj``; its help ends with ``examples``. Local.

    ``kinds``: flag → job. ``kind_of`` returns the flag of the job that the given options ask for; ``""`` by
    default.
    """
    tables = {flag: options_of(kind) for flag, kind in kinds.items()}
    options = _merged([*tables.values(), options_of(Running)])

    def start(context: typer.Context, **values: Any) -> None:
        sources = {key: context.get_parameter_source(key) for key in values}
        given = {key: values[key] for key, source in sources.items() if source and source.name != "DEFAULT"}
        kind = kind_of(given)
        try:
            values = {key: _value(options[key], text) for key, text in given.items()}
            running = Running(**{key: values.pop(key) for key in options_of(Running) if key in values})
            _check_given(tables, kind, values)
            job = kinds[kind](**values)
            check_fields(running)
            job.check_asked()
        except ValueError as error:
            raise UsageError(str(error)) from None
        context.obj(JobCommand(job, running))

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for key, option in options.items():
        only = [flag for flag, table in tables.items() if key in table]
        goes_with = f" Only with {' or '.join(only)}." if only and "" not in only and option.flag not in only else ""
        parameters.append(_parameter(key, option, goes_with))
    start.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, help=help, epilog=as_epilog(examples))(start)


def as_epilog(examples: Sequence[str]) -> str:
    """Return what typer prints as one line for each of ``examples``."""
    return "\n\n".join(["Examples:", *examples])


def _merged(tables: Iterable[Mapping[str, Option]]) -> dict[str, Option]:
    """Return the options of all kinds by field, panel by panel, each with the words that any kind takes."""
    options: dict[str, Option] = {}
    for table in tables:
        for key, option in table.items():
            first = options.get(key, option)
            options[key] = replace(first, choices={**first.choices, **option.choices})
    return dict(sorted(options.items(), key=lambda item: PANELS.index(item[1].panel)))


def _check_given(tables: Mapping[str, Mapping[str, Option]], kind: str, given: Mapping[str, Any]) -> None:
    """Raise a ValueError if the job ``kind`` lacks an option of ``given``, or one says nothing without another."""
    for key in given:
        having = {flag: table[key] for flag, table in tables.items() if key in table}
        if kind not in having:
            said = next(iter(having.values())).flag
            raise ValueError(f"{said} does not go with {kind}" if kind else f"{said} goes with {' or '.join(having)}")
        needs = having[kind].needs
        if needs and not any(given.get(needed) for needed in needs):
            ways = " or ".join(tables[kind][needed].flag for needed in needs)
            raise ValueError(f"{having[kind].flag} goes with {ways}")


def _value(option: Option, given: Any) -> Any:
    """Return the value of a field, of what typer makes of the words."""
    if option.parse is not None:
        try:
            return option.parse(given)
        except ValueError:
            raise ValueError(f"{option.flag} takes {option.metavar}, not {given!r}") from None
    if number := _number_of(option):
        try:
            return number(given)
        except ValueError:
            like = "a whole number" if number is int else "a number such as 0.5"
            raise ValueError(f"{option.flag} takes {like}, not {given!r}") from None
    if get_origin(option.hint) is tuple:
        return tuple(part for word in given for part in (word.split(option.separator) if option.separator else [word]))
    return option.choices.get(given, given)


def _number_of(option: Option) -> type[int] | type[float] | None:
    hints = (option.hint, *get_args(option.hint))
    return None if bool in hints else next((kind for kind in (int, float) if kind in hints), None)


def _parameter(key: str, option: Option, goes_with: str) -> inspect.Parameter:
    """Return the parameter of which typer makes the option."""
    hint: Any = str
    default, flags = option.default, option.flag
    metavar = option.metavar or ("PATH" if option.is_file else None)
    if option.choices:
        hint, metavar = Literal[tuple(option.choices)], f"[{'|'.join(option.choices)}]"
        default = next((word for word, value in option.choices.items() if value == default), default)
    elif number := _number_of(option):
        metavar = metavar or {int: "INTEGER", float: "NUMBER"}[number]
        default = str(default) if isinstance(default, int | float) else default
    elif get_origin(option.hint) is tuple:
        hint, default = list[str], None
    elif option.hint is bool:
        hint = bool
        flags += f"/--no-{option.flag.removeprefix('--')}"
    if key == "model":
        annotation: Any = Annotated[str, typer.Argument(help=option.help, metavar="MODEL")]
    else:
        annotation = Annotated[
            hint | None if default is None else hint,
            typer.Option(
                flags,
                help=option.help + goes_with,
                metavar=metavar,
                rich_help_panel=option.panel,
            ),
        ]
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
