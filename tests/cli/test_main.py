"""What the command line accepts, what it passes on, and how it ends."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import typer
from typer.testing import CliRunner

from distprune import NByM, PerRow, Unstructured
from distprune.cli import main
from distprune.cli.display import Display
from distprune.cli.launchers import Ranks
from distprune.cli.prune_job import PruneJob
from distprune.selection import Block, Pattern


class Ended(BaseException):
    """Stands in for the end of the process."""


def end(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run the console script with ``arguments`` in this process and return its exit code."""

    def leave(code: int) -> NoReturn:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["distprune", *map(str, arguments)])
    try:
        main.run()
    except Ended as ended:
        return int(ended.args[0])
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("run() ends the process")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[PruneJob]:
    """The jobs the command line asks for, which are not run."""
    asked: list[PruneJob] = []

    def record(job: PruneJob, _ranks: Ranks, _display: Display) -> None:
        asked.append(job)

    monkeypatch.setattr(main, "run_job", record)
    return asked


@pytest.mark.parametrize(
    ("text", "amount"), [("0.3", 0.3), ("1", 1), ("1.0", 1.0), ("1000", 1000), ("0", 0), ("0.", 0.0), ("1e-1", 0.1)]
)
def test_amount_with_a_point_is_a_fraction(text: str, amount: int | float) -> None:
    parsed = main._amount(text)
    assert parsed == amount
    assert type(parsed) is type(amount)


@pytest.mark.parametrize("text", ["", "half", "30%", "1/2", "0,3"])
def test_amount_that_is_no_number(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="neither a fraction such as"):
        main._amount(text)


@pytest.mark.parametrize(
    ("text", "amount", "pattern"),
    [
        ("unstructured", "0.5", Unstructured(0.5)),
        ("row", "0.25", PerRow(0.25)),
        ("2:4", None, NByM(2, 4)),
        ("4:8", None, NByM(4, 8)),
        ("block:16", "0.5", Block(16, 0.5)),
    ],
)
def test_patterns(text: str, amount: str | None, pattern: Pattern) -> None:
    assert main._pattern(text, amount) == pattern


@pytest.mark.parametrize(
    ("text", "amount", "message"),
    [
        ("2:4", "0.5", "--pattern 2:4 says how much goes; leave out --amount 0.5"),
        ("row", None, r"--pattern row needs --amount, a fraction such as 0.5$"),
        ("block:16", None, r"--pattern block:16 needs --amount, a fraction such as 0.5$"),
        ("unstructured", "0", r"needs --amount, a fraction such as 0.5, not 0$"),
        ("unstructured", "1", r"needs --amount, a fraction such as 0.5, not 1$"),
        ("block:16", "100", r"needs --amount, a fraction such as 0.5, not 100$"),
        ("block", "0.5", "'block' is none of unstructured, row, N:M such as 2:4, or block:SIZE such as block:16"),
        ("block:", "0.5", "'block:' is none of"),
        ("block:4:8", "0.5", "'block:4:8' is none of"),
        ("2:", None, "'2:' is none of"),
        ("column", "0.5", "'column' is none of"),
    ],
)
def test_patterns_that_are_none(text: str, amount: str | None, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        main._pattern(text, amount)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("row", "0.0"), ("unstructured", "1.0"), ("block:16", "1.0"), ("block:0", "0.5"), ("4:2", None)],
)
def test_patterns_that_make_no_sense(text: str, amount: str | None) -> None:
    with pytest.raises(ValueError, match=r"is not between 0 and 1|is no size of a block|is no pattern"):
        main._pattern(text, amount)


def test_defaults(jobs: list[PruneJob]) -> None:
    result = CliRunner().invoke(main.app, ["prune", "smollm2-135m", "--output", "out", "--amount", "0.5"])
    assert result.exit_code == 0
    assert jobs == [PruneJob("smollm2-135m", "out", "magnitude", None, 0.5, 0)]


def test_patterns_without_calibration(jobs: list[PruneJob]) -> None:
    for line in ("--pattern 2:4", "--pattern block:16 --amount 0.5 --scope tensor"):
        assert CliRunner().invoke(main.app, ["prune", "m", "--output", "o", *line.split()]).exit_code == 0
    assert jobs == [
        PruneJob("m", "o", "magnitude", None, None, 0, NByM(2, 4)),
        PruneJob("m", "o", "magnitude", "tensor", None, 0, Block(16, 0.5)),
    ]


def test_every_option_arrives(jobs: list[PruneJob]) -> None:
    line = (
        "prune m --output o --amount 12 --method random --scope tensor --seed 7 --again --include *a --include *b "
        "--exclude *c --dtype bfloat16 --device cpu --overwrite --eval t.txt --eval-tokens 64 --eval-length 16 "
        "--timeout 30"
    )
    assert CliRunner().invoke(main.app, line.split()).exit_code == 0
    assert jobs == [
        PruneJob(
            model="m",
            output="o",
            method="random",
            scope="tensor",
            amount=12,
            seed=7,
            again=True,
            include=("*a", "*b"),
            exclude=("*c",),
            dtype=torch.bfloat16,
            overwrite=True,
            evaluate_on="t.txt",
            evaluation_tokens=64,
            evaluation_length=16,
        )
    ]


@pytest.mark.parametrize(
    "line",
    [
        "prune",
        "prune m --amount 0.3",
        "prune m --output o",
        "prune m --output o --amount half",
        "prune m --output o --amount 0.3 --method wanda",
        "prune m --output o --amount 0.3 --scope row",
        "prune m --output o --amount 0.3 --pattern 2:4",
        "prune m --output o --pattern row",
        "prune m --output o --amount 0.3 --resume",
        "prune m --output o --amount 0.3 --dtype int8",
        "prune m --output o --amount 0.3 --eval-length 1",
        "prune m --output o --amount 0.3 --timeout 0",
        "prune m --output o --amount 0.3 --verbose",
        "inspect",
        "sharpen m",
        "",
    ],
)
def test_wrong_usage(
    jobs: list[PruneJob], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    assert end(monkeypatch, *line.split()) == 2
    captured = capsys.readouterr()
    assert "Usage:" in captured.err + captured.out
    assert "Traceback" not in captured.err
    assert jobs == []


def test_prunes_and_inspects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: Path
) -> None:
    output = tmp_path / "out"
    assert end(monkeypatch, "prune", model_folder, "--output", output, "--amount", "100", "--scope", "tensor") == 0
    assert "magnitude, tensor, amount 100" in capsys.readouterr().out
    assert end(monkeypatch, "inspect", output, "--json") == 0
    inspected = json.loads(capsys.readouterr().out)
    zeros = {tensor["name"]: tensor["num_zeros"] for tensor in inspected["tensors"]}
    assert zeros["model.layers.1.mlp.up_proj.weight"] == 100
    assert end(monkeypatch, "inspect", output) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in zeros)  # none is cut to fit a screen that is not there
    assert f"{inspected['num_zeros']:,}" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{model}/nothing", "--output", "{out}", "--amount", "0.3"], "there is no model directory"),
        (["{model}", "--output", "{out}", "--amount", "1.5"], r"amount=1.5 is outside [0.0, 1.0]"),
        (["{model}", "--output", "{out}", "--amount", "-1"], "amount=-1 is negative"),
        (["{model}", "--output", "{out}", "--amount", "999999"], "more than the 5760 unpruned elements"),
        (["{model}", "--output", "{out}", "--amount", "0.3", "--include", "*.q"], "'*.q' matches no parameter"),
        (["{model}", "--output", "{model}", "--amount", "0.3"], "is not empty"),
        (["{model}", "--output", "{model}", "--amount", "0.3", "--overwrite"], "lie inside each other"),
        (["{model}", "--output", "{out}", "--amount", "0.3", "--eval", "{out}.txt"], "there is no text file"),
        (
            ["{model}", "--output", "{out}", "--amount", "0.3", "--eval", "{text}", "--eval-length", "9000"],
            "one window of 9000",
        ),
        (["{model}", "--output", "{text}/out", "--amount", "0.3"], "is a file"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model_folder: Path,
    text_file: Path,
    arguments: list[str],
    message: str,
) -> None:
    places = {"model": str(model_folder), "out": str(tmp_path / "out"), "text": str(text_file)}
    assert end(monkeypatch, "prune", *(argument.format(**places) for argument in arguments)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_inspecting_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert end(monkeypatch, "inspect", tmp_path / "nothing") == 1
    assert capsys.readouterr().err.startswith("error: there is no model directory")


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(main, "run_job", fail)


LINE = ("prune", "m", "--output", "o", "--amount", "0.3")


def test_what_nobody_expected_gets_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, RuntimeError("connection reset by peer"))
    assert end(monkeypatch, *LINE) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("RuntimeError: connection reset by peer\n")


@pytest.mark.parametrize(("error", "code"), [(SystemExit(143), 143), (KeyboardInterrupt(), 130)])
def test_signals_end_at_once(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    fail_with(monkeypatch, error)
    assert end(monkeypatch, *LINE) == code


def test_other_ranks_speak_after_the_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(main, "likely_rank", lambda _: 3)
    fail_with(monkeypatch, ValueError("no such thing"))
    assert end(monkeypatch, *LINE) == 1
    assert capsys.readouterr().err == "rank 3: error: no such thing\n"
    assert slept == [main._AFTER_FIRST_RANK]


@pytest.mark.parametrize(("error", "codes"), [(RuntimeError("peer gone"), [1]), (ValueError("mistake"), [])])
def test_mpi_is_aborted_only_for_what_nobody_expected(
    monkeypatch: pytest.MonkeyPatch, error: Exception, codes: list[int]
) -> None:
    aborted: list[int] = []

    class Mpi:
        class COMM_WORLD:
            Abort = aborted.append

    monkeypatch.setitem(sys.modules, "mpi4py.MPI", Mpi)
    fail_with(monkeypatch, error)
    assert end(monkeypatch, *LINE) == 1
    assert aborted == codes
