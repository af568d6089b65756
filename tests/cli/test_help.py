"""What ``--help`` says of each command, and what is said where there is none."""

from __future__ import annotations

import importlib.util
import shlex
from typing import Any

import pytest
import typer

from distprune import __main__
from distprune.cli import main
from tests.cli.test_main import asked

JOBS = ("prune", "shrink", "finetune", "sample")


def test_the_help_of_each_command() -> None:
    """Options in groups, and two examples that are what the command takes."""
    command: Any = typer.main.get_command(main.app)
    for name, of in command.commands.items():
        examples = of.epilog.split("\n\n")[1:]
        assert len(examples) == 2
        for example in examples:
            words = shlex.split(example.partition("distprune ")[2])
            assert words[0] == name
            of.make_context(name, words[1:], obj=lambda *_: None)
            if name in JOBS:
                asked(" ".join(words))
        options = [option for option in of.params if option.param_type_name == "option"]
        if name in JOBS:
            assert {option.name for option in options if not option.rich_help_panel} == set()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("typer", "rich") else object())
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            __main__.run()
    assert capsys.readouterr().err == (
        "error: the command line needs typer, rich, which are not installed: pip install 'distprune[hf]'\n"
    )
