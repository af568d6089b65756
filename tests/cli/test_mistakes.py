"""What is shown of an error: a line of what a user can mend, and a traceback of what nobody expected."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distprune.jobs import run
from tests.cli.test_leaving import LINE, Pair, pair
from tests.cli.test_main import _sigterm_as_before, end
from tests.started import be_rank

__all__ = ["_sigterm_as_before", "pair"]


BUGS: dict[str, Callable[[], object]] = {
    "ValueError": lambda: list(zip([1], [], strict=True)),
    "TypeError": lambda: len(None),  # type: ignore[arg-type]
    "OSError": lambda: os.fstat(-1),
    "ModuleNotFoundError": lambda: importlib.import_module("distprune.none"),
    "NotImplementedError": lambda: torch.empty(1, device="meta").to("cpu"),
}


@pytest.mark.parametrize("kind", BUGS)
def test_what_no_check_raised_gets_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: Path, kind: str
) -> None:
    """Though checks raise errors of that type too."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr("distprune.jobs.prune.prune_model", lambda *_, **__: BUGS[kind]())
    assert end(monkeypatch, "prune", model_folder, "--output", tmp_path / "out", "--sparsity", "0.3") == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert f"\n{kind}: " in error
    assert "jobs/prune.py" in error
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == error.strip()


def be_rank_with_a_bug(variables: dict[str, str], arguments: list[str], log: str) -> None:
    run.check_output = lambda *_, **__: list(zip([1], [], strict=True))
    be_rank(variables, arguments, log)


@pytest.mark.launcher
@pytest.mark.xdist_group("launcher")
def test_where_nobody_expected_it_is_shown_by_the_first_rank_too(pair: Pair) -> None:
    for rank, be in enumerate((be_rank, be_rank_with_a_bug)):
        pair.variables[rank]["TORCHELASTIC_ERROR_FILE"] = str(pair.folder / f"error{rank}.json")
        pair.start_one(rank, LINE, be)
    assert (pair.code(0), pair.code(1)) == (1, 1)
    for rank in range(2):
        for said in (pair.said(rank), (pair.folder / f"error{rank}.json").read_text()):
            assert "check_output = lambda *_, **__: list(zip([1], [], strict=True))" in said
            assert "ValueError: zip() argument 2 is shorter than argument 1" in said
    assert "ValueError: rank 1 of 2: zip()" in pair.said(0)
