"""Commands that run jobs. Their options are the fields of the jobs' dataclasses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from distprune.jobs import Job, Option, StreamedJob, choices_of, options_of

__all__ = ["JobCommand", "add_command"]

_LONGEST_TIMEOUT = 1e6  # seconds; torch counts milliseconds in 32 bits in places
_WHERE = {  # what a command takes beside the fields of its job
    "device": (
        Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA where there is a GPU.")],
        "auto",
    ),
    "timeout": (Annotated[float, typer.Option(help="Seconds a rank waits for the others.")], 600.0),
}


@dataclass(frozen=True)
class JobCommand:
    """A job, and where to run it."""

    job: Job
    device: str
    timeout: float


def add_command(app: typer.Typer, name: str, help: str, kinds: Mapping[str, type[Job]]) -> None:
    """Add a command that gives a :class:`JobCommand` to the context's ``obj``. Local.

    ``kinds``: the job that is meant where an option is given, by the option's flag; ``""``: by default.
    """

    def start(context: typer.Context, **values: Any) -> None:
        given = {
            key: value
            for key, value in values.items()
            if (source := context.get_parameter_source(key)) is not None and source.name != "DEFAULT"
        }
        device, timeout = values["device"], values["timeout"]
        if not 1 <= timeout <= _LONGEST_TIMEOUT:
            raise typer.BadParameter(f"--timeout {timeout:g} is not between 1 and {_LONGEST_TIMEOUT:g} seconds")
        job = _job_of(kinds, {key: value for key, value in given.items() if key not in _WHERE})
        if isinstance(job, StreamedJob):
            if device == "cuda":
                raise typer.BadParameter("--streamed runs on the CPU; leave out --device")
            device = "cpu"
        context.obj(JobCommand(job, device, timeout))

    own = [inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    own += [_parameter(key, kinds) for key in _names(kinds.values())]
    own += [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
        for key, (hint, default) in _WHERE.items()
    ]
    start.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    app.command(name, help=help)(start)


def _job_of(kinds: Mapping[str, type[Job]], given: Mapping[str, Any]) -> Job:
    """Return the job that the options that were ``given`` ask for.

    Raises:
        typer.BadParameter: options that do not go together, or values that no job takes.
    """
    flags = {key: option.flag for kind in kinds.values() for key, option in options_of(kind).items()}
    asked = next((flag for flag in kinds if flag in {flags[key] for key in given}), "")
    options, hints = options_of(kinds[asked]), get_type_hints(kinds[asked])
    for key, value in given.items():
        having = [flag for flag, kind in kinds.items() if key in options_of(kind)]
        said = flags[key]
        if key in options and (choices := choices_of(hints[key])) and value not in choices:
            said = f"{said} {value}"
            having = [flag for flag, kind in kinds.items() if value in choices_of(get_type_hints(kind)[key])]
        if asked not in having:
            goes = f"goes with {' or '.join(having)}" if not asked else f"does not go with {asked}"
            raise typer.BadParameter(f"{said} {goes}")
        if (needs := options[key].needs) and not any(given.get(needed) for needed in needs):
            raise typer.BadParameter(f"{said} goes with {' or '.join(flags[needed] for needed in needs)}")
    try:
        job = kinds[asked](**{key: _value(options[key], hints[key], value) for key, value in given.items()})
        job.check_asked()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return job


def _value(option: Option, hint: Any, given: Any) -> Any:
    """Return the value of a field, of what typer makes of the words."""
    if get_origin(hint) is tuple:
        return tuple(part for word in given for part in (word.split(option.separator) if option.separator else [word]))
    return given if option.choices is None else option.choices[given]


def _names(kinds: Iterable[type[Job]]) -> list[str]:
    """Return the fields of all kinds: model and output, those of some jobs, and those of all."""
    of_all = [of.name for of in fields(Job)]
    of_some = [of.name for kind in kinds for of in fields(kind) if of.name not in of_all]
    return list(dict.fromkeys([*of_all[:2], *of_some, *of_all[2:]]))


def _parameter(name: str, kinds: Mapping[str, type[Job]]) -> inspect.Parameter:
    """Return the parameter of which typer makes the option; where jobs differ, with all choices and no default."""
    having = {flag: kind for flag, kind in kinds.items() if name in options_of(kind)}
    hints = [get_type_hints(kind)[name] for kind in having.values()]
    option = options_of(next(iter(having.values())))[name]
    defaults = {flag: next(of.default for of in fields(kind) if of.name == name) for flag, kind in having.items()}
    words = tuple(option.choices or dict.fromkeys(value for hint in hints for value in choices_of(hint)))
    parts = {hints[0], *get_args(hints[0])}
    goes_with = None if "" in having or option.flag in kinds else f"With {' or '.join(having)}"
    hint: Any = Literal.__getitem__(words) if words else next((of for of in (bool, int, float) if of in parts), str)
    named = option.flag
    shown: bool | str = True
    default = next(iter(defaults.values()))
    if option.flag in kinds:
        default = False if hint is bool else None
    elif len(set(defaults.values())) > 1:
        others = (f"{of} with {flag}" for flag, of in defaults.items() if of != default)
        shown = ", ".join([str(default), *others])
        default = None
    elif get_origin(hints[0]) is tuple:
        hint, default = list[str], None
    elif option.choices is not None:
        default = next(word for word, value in option.choices.items() if value == default)
    if hint is bool and option.flag not in kinds:
        named += f"/--no-{option.flag.removeprefix('--')}"
    if name == "model":
        annotation: Any = Annotated[str, typer.Argument(help=option.help)]
    else:
        annotation = Annotated[
            hint if default is not None or default is MISSING else hint | None,
            typer.Option(
                named,
                help=option.help,
                min=option.least if hint in (int, float) and option.parse is None else None,
                max=option.most if hint in (int, float) and option.parse is None else None,
                metavar=option.metavar or ("PATH" if option.is_file else None),
                parser=None if option.parse is None else _parser(option.parse),
                rich_help_panel=option.panel or goes_with,
                show_default=shown,
            ),
        ]
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=annotation,
        default=inspect.Parameter.empty if default is MISSING else default,
    )


def _parser(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return ``parse`` with its errors as typer's; defaults are values already."""

    def parser(text: Any) -> Any:
        try:
            return parse(text) if isinstance(text, str) else text
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser
