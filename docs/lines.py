"""The lines of the reference that are generated: public names for autodoc, and the commands with their options."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import is_dataclass
from typing import Any

import typer

from distprune.cli.main import app
from distprune.jobs import Job

__all__ = ["command_lines", "name_lines"]


def name_lines(module: str, name: str) -> list[str]:
    """Return the lines by which autodoc documents a public name of a module."""
    of = getattr(importlib.import_module(module), name)
    if inspect.isclass(of):
        members = [] if issubclass(of, Job) else ["   :members:"]  # a job's fields are in its signature
        fields = ["   :undoc-members:"] if is_dataclass(of) and name.endswith("Report") else []
        return [f".. autoclass:: {module}.{name}", *members, *fields, ""]
    return [f".. autofunction:: {module}.{name}", ""]


def command_lines(name: str) -> list[str]:
    """Return the reference of the command ``name``: what it is for, and its options in the order of its help."""
    command: Any = typer.main.get_command(app)
    command = command.commands[name]
    lines = [*command.help.splitlines(), "", ".. code-block:: bash", ""]
    lines += [f"   {example}" for example in command.epilog.split("\n\n")[1:]]
    lines += ["", f".. program:: distprune {name}", ""]
    for parameter in command.params:
        flags = [*parameter.opts, *parameter.secondary_opts]
        if not flags[0].startswith("--"):
            flags = [parameter.name.upper()]
        elif not parameter.is_flag:
            flags = [f"{flag} {parameter.metavar or 'TEXT'}" for flag in flags]
        lines += [f".. option:: {', '.join(flags)}", "", f"   {parameter.help}"]
        lines += [f"   Default: ``{said}``." for said in [_default(parameter)] if said]
        lines += [f"   *{panel}.*" for panel in [parameter.rich_help_panel] if panel]
        lines.append("")
    return lines


def _default(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.default is None or parameter.default is False:
        return ""
    return parameter.opts[0] if parameter.default is True else str(parameter.default)
