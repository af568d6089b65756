"""Directives of the reference, and what Markdown of other places needs to become pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from lines import command_lines, name_lines
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

__all__ = ["setup"]


class _Generated(SphinxDirective):  # type: ignore[misc]
    def parse(self, lines: list[str], source: str) -> list[nodes.Node]:
        holder = nodes.section()
        holder.document = self.state.document
        content = StringList(["````{eval-rst}", *lines, "````"], source=source)
        self.state.nested_parse(content, 0, holder)
        return list(holder.children)


class Names(_Generated):
    """``{names} distprune``: the names in its lines, each with its signature and docstring."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        return self.parse([line for name in self.content for line in name_lines(module, name)], "names")


class Command(_Generated):
    """``{command} prune``: what the command is for, and its options."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse(command_lines(self.arguments[0]), "command")


def _link(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links to Markdown files outside of docs/ be downloads; on their own pages Sphinx knows no such files."""
    page = Path(app.srcdir) / docname

    def link(found: re.Match[str]) -> str:
        is_page = (page.parent / found[2]).resolve().is_relative_to(app.srcdir)
        return found[0] if is_page else f"{{download}}`{found[1]} <{found[2]}>`"

    source[0] = re.sub(r"\[([^\]]+)\]\(([./\w-]+\.md)\)", link, source[0])


def _escape(_app: Sphinx, _what: str, _name: str, _of: Any, _options: Any, lines: list[str]) -> None:
    """Keep ``|w|`` and ``x**2`` of docstrings as they stand, outside literals."""
    for i, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        parts[::2] = [
            re.sub(r"\||\*\*", lambda found: "".join(f"\\{c}" for c in found[0]), part) for part in parts[::2]
        ]
        lines[i] = "".join(parts)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives."""
    app.add_directive("names", Names)
    app.add_directive("command", Command)
    app.connect("source-read", _link)
    app.connect("autodoc-process-docstring", _escape, priority=600)  # after napoleon
    return {"parallel_read_safe": True}
