"""The command line, run within the process of a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

import pytest

from distprune.cli import main

__all__ = ["Command", "Said", "command_of"]


class Said(NamedTuple):
    out: str
    err: str


Command: TypeAlias = Callable[..., Said]


class Ended(BaseException):
    """Stands in for the end of the process."""


def command_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs the console script; it must end with ``code``."""

    def leave(code: int) -> NoReturn:
        raise Ended(code)

    def command(*words: str | Path, code: int = 0) -> Said:
        monkeypatch.setattr(os, "_exit", leave)
        monkeypatch.setattr(sys, "argv", ["distprune", *map(str, words)])
        capsys.readouterr()
        with pytest.raises((Ended, SystemExit)) as ended:
            main.run()
        said, args = Said(*capsys.readouterr()), ended.value.args
        assert (args[0] if args and args[0] else 0) == code, (words, said)
        return said

    return command
