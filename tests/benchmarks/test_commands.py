"""What benchmarks ask for on the command line is what there is."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_one_shot, bench_recovery
from benchmarks.texts import KINDS
from distprune.cli.commands import JobCommand
from distprune.cli.main import app


def test_one_shot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_one_shot, "demo_model", lambda: Path("model"))
    names = {"methods": bench_one_shot.METHODS, "patterns": bench_one_shot.PATTERNS}
    cases = [*bench_one_shot.cases(Namespace(**names, samples=[16], seeds=[0], ranks=[1]))]
    assert len(cases) > len(bench_one_shot.METHODS)
    for case in cases:
        assert bench_one_shot.asked(case, Path("text"), "out").output == "out"


def test_recovery(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[JobCommand] = []

    def launch(*words: str) -> dict[str, Any]:
        app([*words], obj=asked.append, standalone_mode=False)
        return {"training": {"num_steps": 3, "num_zeros": 1, "num_elements": 2}}

    monkeypatch.setattr(bench_recovery, "launch", launch)
    monkeypatch.setattr(bench_recovery, "demo_model", lambda: Path("model"))
    monkeypatch.setattr(bench_recovery, "perplexities_of", lambda _: dict.fromkeys(KINDS, 1.0))
    monkeypatch.setattr(bench_recovery, "write_calibration", lambda folder: folder / "text")
    monkeypatch.setattr(sys, "argv", ["", "--patterns", *bench_recovery.PATTERNS])
    bench_recovery.main()
    assert len(asked) == len(bench_recovery.PATTERNS) * (1 + len(bench_recovery.TRAINERS))
    assert "50.00%" in capsys.readouterr().out
