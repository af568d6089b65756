"""Commands that run jobs: typer's parameters are made of the fields of the jobs' dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from typing import Annotated, Any, Literal, get_origin

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
    options: dict[str, Option] = {}
    for table in (*tables.values(), options_of(Running)):
        for key, option in table.items():
            first = options.get(key, option)
            options[key] = replace(first, choices={**first.choices, **option.choices})

    def is_off(key: str, value: Any) -> bool:
        """Whether it says that a job is not to be what it is not without: --no-streamed, --no-resume."""
        return value is False and (options[key].flag in kinds or not options[key].default)

    def start(context: typer.Context, **values: Any) -> None:
        sources = {key: context.get_parameter_source(key) for key in values}
        given = {
            key: values[key]
            for key, source in sources.items()
            if source and source.name != "DEFAULT" and not is_off(key, values[key])
        }
        kind = kind_of(given)
        try:
            running = Running(**{key: given.pop(key) for key in options_of(Running) if key in given})
            check_fields(running)
            _check_given(tables, kind, given)
            job = kinds[kind](**given)
            job.check_asked()
            job.check_given(given)
        except ValueError as error:
            raise UsageError(str(error)) from None
        context.obj(JobCommand(job, running))

    parameters = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for key, option in sorted(options.items(), key=lambda item: PANELS.index(item[1].panel)):
        only = [flag for flag, table in tables.items() if key in table]
        goes_with = f" Only with {' or '.join(only)}." if only and "" not in only and option.flag not in only else ""
        # What asks for a job by its flag has its default there alone.
        parameters.append(_parameter(key, replace(option, help=option.help + goes_with), option.flag not in tables))
    start.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, help=help, epilog=as_epilog(examples))(start)


def as_epilog(examples: Sequence[str]) -> str:
    """Return what typer prints as one line for each of ``examples``."""
    return "\n\n".join(["Examples:", *examples])


def _check_given(tables: Mapping[str, Mapping[str, Option]], kind: str, given: Mapping[str, Any]) -> None:
    """Raise a ValueError if the job ``kind`` lacks an option of ``given``, or one says nothing without another."""
    for key in given:
        having = {flag: table[key] for flag, table in tables.items() if key in table}
        if kind not in having:
            said = next(iter(having.values())).flag
            with_kind = f"does not go with {_asking(tables, kind, given)}"
            raise ValueError(f"{said} {with_kind if kind else 'goes with ' + ' or '.join(having)}")
        needs = having[kind].needs
        if needs and not any(given.get(needed) for needed in needs):
            ways = " or ".join(tables[kind][needed].flag for needed in needs)
            raise ValueError(f"{having[kind].flag} goes with {ways}")


def _asking(tables: Mapping[str, Mapping[str, Option]], kind: str, given: Mapping[str, Any]) -> str:
    """Return what of ``given`` asks for the job ``kind``: its flag, or what the job by default does not take."""
    plain = tables[""]
    asking = {
        option.flag: f"{option.flag} {given[key]}"
        for key, option in tables[kind].items()
        if key in given and (key not in plain or (option.choices and given[key] not in plain[key].choices))
    }
    return kind if kind in asking else next(iter(asking.values()), kind)


def _parameter(key: str, option: Option, shows_default: bool) -> inspect.Parameter:
    """Return the parameter of which typer makes the option."""
    hint: Any = option.hint
    default, flags = option.default, option.flag
    if option.choices:
        hint = Literal[tuple(option.choices)]
        default = next((word for word, value in option.choices.items() if value == default), default)
    elif option.parse is not None:
        hint, default = str, str(default) if isinstance(default, int | float) else default
    elif get_origin(hint) is tuple:
        hint, default = list[str], None
    elif hint is bool:
        flags += f"/--no-{flags.removeprefix('--')}"
    metavar = option.metavar or ("PATH" if option.is_file else None)
    about: Any = typer.Option(
        flags, help=option.help, metavar=metavar, rich_help_panel=option.panel, show_default=shows_default
    )
    if key == "model":
        about = typer.Argument(help=option.help, metavar="MODEL")
    annotation: Any = Annotated[hint | None if default is None else hint, about]
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
