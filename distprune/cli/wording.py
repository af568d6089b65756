"""Errors of jobs in words of the command line: ``--own-words 3``, where Python says ``own_words=3``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from distprune.jobs.options import Option

_VALUE = r"'[^']*'|\"[^\"]*\"|\.\.\.|[^\s,;:()\[\]]*[^\s,;:.()\[\]]"
_CALL = re.compile(r"\w+\([^()]*=[^()]*\)")  # of a pattern, which the command line has no other word for


def worded(text: str, options: Mapping[str, Option], given: Collection[str] = ()) -> str:
    """Return ``text`` with the names of fields, which have these ``options``, as options.

    Names that were ``given`` as values, such as a file called own_words, stay.

    >>> options = {"own_words": Option("", flag="--own-words"), "offload": Option("", flag="--offload", hint=bool)}
    >>> worded("own_words=3 is too much; offload=True (--offload) helps, and own_words='none'", options)
    '--own-words 3 is too much; --offload helps, and --own-words none'
    """
    kept: list[str] = []

    def keep(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"\0{len(kept) - 1}\0"

    text = _CALL.sub(keep, text)
    names = "|".join(sorted(options, key=len, reverse=True))
    bare = "|".join(name for name in sorted(options, key=len, reverse=True) if "_" in name and name not in given)
    text = re.sub(rf"\b(?:{names})(?:=(?:{_VALUE}))? \((--[^()]+)\)", r"\1", text)  # said both ways
    text = re.sub(rf"(?<![\w./'\"-])({names})=({_VALUE})", lambda found: _said(options[found[1]], found[2]), text)
    if bare:
        text = re.sub(rf"(?<![\w./'\"-])({bare})(?![\w/'\"(=-]|\.\w)", lambda found: options[found[1]].flag, text)
    return re.sub("\0(\\d+)\0", lambda found: kept[int(found[1])], text)


def _said(option: Option, value: str) -> str:
    """Return the option with its ``value``, which Python has written."""
    if option.hint is bool and value in ("True", "False"):
        return option.flag if value == "True" else f"--no-{option.flag.removeprefix('--')}"
    if value in ("None", "..."):
        return option.flag if value == "..." else f"no {option.flag}"
    word = value.strip("'\"").removeprefix("torch.")
    return f"{option.flag} {word}" if word else f"{option.flag} {value}"
