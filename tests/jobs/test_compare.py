"""Outputs of jobs side by side."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import distprune as prune
from distprune.jobs import PruneJob, compare_outputs, run_prune_job
from distprune.jobs.run import REPORT_NAME
from tests.cli.test_main import end


def write(path: Path, *, zeros: float = 0.5, after: dict[str, Any] | None = None, **more: Any) -> Path:
    """Write a report like that of a job into ``path``."""
    path.mkdir()
    known = {"num_zeros": 1, "num_prunable": 2, "num_parameters": 4_000_000, "sparsity": zeros}
    arguments = {"evaluation_tokens": 64, "evaluation_length": 16, "pattern": "unstructured"}
    after = {"/data/t.txt": 20.0} if after is None else after
    report = {
        "model": "/models/dense",
        "arguments": arguments,
        "zeros": known,
        "perplexity_before": dict.fromkeys(after, 10.0),
        "perplexity_after": after,
        "stage_seconds": {"total": 1.25},
        **(more or {"pruning": {"score": "magnitude"}}),
    }
    (path / REPORT_NAME).write_text(json.dumps(report))
    return path


def test_what_a_job_has_written(model_folder: Path, text_file: Path, tmp_path: Path) -> None:
    job = PruneJob(
        model=str(model_folder),
        output=str(tmp_path / "out"),
        pattern="2:4",
        evaluate_on=(str(text_file),),
        evaluation_length=16,
    )
    report = run_prune_job(job)
    (found,) = compare_outputs([tmp_path / "out"]).outputs
    assert (found.sparsity, found.removed, found.method) == (0.5, None, "magnitude, 2:4")
    assert found.num_parameters == report.work.num_parameters
    text = (str(text_file), 8192, 16)
    assert found.after == {text: report.after.perplexity[str(text_file)]}
    assert found.before == {text: report.before.perplexity[str(text_file)]}
    assert found.seconds == report.seconds["total"]


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("pruned"))
    write(Path("tuned"), after={"/data/t.txt": 15.0, "u.txt": "inf"}, training={"method": "masked fine-tuning"})
    removal = {"method": "obs", "num_parameters": 75_000_000, "num_parameters_before": 100_000_000}
    write(Path("smaller"), after={}, removal=removal)
    (Path("smaller") / REPORT_NAME).write_text((Path("smaller") / REPORT_NAME).read_text().replace("zeros", "_"))
    assert end(monkeypatch, "compare", "pruned", "tuned", "smaller") == 0
    assert capsys.readouterr().out.splitlines() == [
        "output         sparsity  parameters  t.txt  u.txt  seconds  method",
        "dense, before         -           -  10.00      -        -  -",
        "pruned           50.0 %       4.0 M  20.00      -      1.2  magnitude",
        "tuned            50.0 %       4.0 M  15.00    inf      1.2  masked fine-tuning",
        "smaller          25.0 %      75.0 M      -      -      1.2  shrink by obs",
        "(perplexity by text)",
        "(sparsity of a smaller model: the share of all parameters that is gone)",
    ]
    write(Path("silent"), after={})
    assert str(compare_outputs(["silent"])).endswith("(no perplexities: run the jobs with --eval)")


def rows_of(shown: str) -> dict[str, list[list[str]]]:
    """Return what a turned table says of each row, part by part."""
    found: dict[str, list[list[str]]] = {}
    for line in shown.splitlines():
        name, *cells = re.split("  +", line)
        found.setdefault(name, []).append(cells)
    return found


def test_texts_that_are_called_alike(tmp_path: Path) -> None:
    same = write(tmp_path / "a", after={"/data/a/t.txt": 1.0, "/data/b/t.txt": 2.0})
    shown = str(compare_outputs([same])).split()
    assert {"/data/a/t.txt", "/data/b/t.txt"} <= {*shown}


@pytest.mark.parametrize("changed", ["evaluation_tokens", "evaluation_length"])
def test_a_text_of_which_less_was_run_has_a_column_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    report = json.loads((write(Path("b")) / REPORT_NAME).read_text())
    report["arguments"][changed] = 32
    Path("b", REPORT_NAME).write_text(json.dumps(report))
    rows = rows_of(str(compare_outputs([write(Path("a")), "b"])))
    told = "32 tokens in windows of 16" if changed == "evaluation_tokens" else "64 tokens in windows of 32"
    assert rows["t.txt (64 tokens in windows of 16)"] == [["10.00", "20.00", "-"]]
    assert rows[f"t.txt ({told})"] == [["10.00", "-", "20.00"]]


def test_a_wide_table_is_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = [
        write(Path(f"pruned-by-magnitude-to-half-{n}"), after={"t.txt": 10.0 + n, "u.txt": 20.0, "w.txt": 30.0})
        for n in range(5)
    ]
    lines = str(compare_outputs(outputs)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:4] == [
        "output      dense, before  pruned-by-magnitude-to-half-0",
        "sparsity                -                         50.0 %",
        "parameters              -                          4.0 M",
        "t.txt               10.00                          10.00",
    ]
    rows = rows_of("\n".join(lines))
    assert [name for part in rows["output"] for name in part][1:] == [str(path) for path in outputs]
    assert [value for part in rows["t.txt"] for value in part][1:] == [f"{10 + n:.2f}" for n in range(5)]


def test_models_that_no_job_has_written(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = prune.load(model_folder)
    num_before = sum(parameter.numel() for parameter in model.parameters())
    prune.prune_model(model, 0.5)
    prune.save(model, "half")
    smaller = prune.load(model_folder)
    prune.shrink_model(smaller, torch.arange(16).view(2, 8), mlp=0.5, refit="none")
    prune.save(smaller, "smaller")
    num_left = sum(parameter.numel() for parameter in smaller.parameters())
    shown = f"{prune.sparsity(smaller):.1%}".replace("%", " %")  # weights of tests are rounded, some to zero
    assert num_left < num_before
    assert end(monkeypatch, "compare", "half", "smaller") == 0
    assert capsys.readouterr().out.splitlines() == [
        "output   sparsity  parameters  seconds  method",
        f"half       50.0 %  {num_before:>10,}        -  -",
        f"smaller  {shown:>8}  {num_left:>10,}        -  -",
        "(no perplexities: run the jobs with --eval)",
    ]


def test_what_a_terminal_would_obey_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    red = "\x1b[31mred\x07\x9b0m"
    write(Path("a"), after={f"/data/{red}": 1.0}, pruning={"method": red})
    assert end(monkeypatch, "compare", "a") == 0
    shown = capsys.readouterr().out
    assert r"\x1b[31mred\x07\x9b0m" in shown
    assert all(of.isprintable() or of == "\n" for of in shown)


def test_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    outputs = [
        write(tmp_path / "b", zeros=0.5),
        write(tmp_path / "a", zeros=0.25, after={"/data/t.txt": 12.0, "/data/u.txt": 1000.0}),
        write(tmp_path / "c", zeros=0.5, after={"/data/u.txt": 14.0}, pruning={"method": "admm"}),
    ]
    first, second = compare_outputs(outputs).draw().axes
    assert first.get_title() == "Perplexity on t.txt"
    lines = {line.get_label(): line.get_xydata().tolist() for line in first.lines if line.get_label() != "before"}
    assert lines == {"magnitude": [[0.25, 12.0], [0.5, 20.0]]}
    assert (first.get_yscale(), second.get_yscale()) == ("linear", "log")
    assert {line.get_label() for line in second.lines} == {"magnitude", "admm", "before"}
    assert end(monkeypatch, "compare", *outputs, "--output", tmp_path / "all.png") == 0
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "(perplexity by text)" in capsys.readouterr().out


DAMAGES: dict[str, tuple[str, Any]] = {
    "a sparsity": ("zeros", {"sparsity": "half", "num_parameters": 1}),
    "no zeros": ("zeros", 5),
    "parameters": ("zeros", {"sparsity": 0.5, "num_parameters": "many"}),
    "seconds": ("stage_seconds", {"total": None}),
    "tokens": ("arguments", {"evaluation_tokens": [], "evaluation_length": 1, "pattern": "2:4"}),
    "perplexities": ("perplexity_after", ["t.txt"]),
    "a perplexity": ("perplexity_after", {"t.txt": {}}),
    "a number too large": ("perplexity_after", {"t.txt": 10**400}),
    "nothing before": ("removal", {"method": "obs", "num_parameters": 1, "num_parameters_before": 0}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_report_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    path = write(tmp_path / "a") / REPORT_NAME
    key, value = DAMAGES[damage]
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert end(monkeypatch, "compare", tmp_path / "a") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path} is no report of a job, or damaged")
    assert error.count("\n") == 1


def test_errors_name_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, silent = write(tmp_path / "good"), write(tmp_path / "silent", after={})
    for name, text in (("broken", "{"), ("foreign", "{}"), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / REPORT_NAME).write_text(text)
    for words, message in (
        (
            [good, tmp_path / "none", tmp_path],
            f"error: {tmp_path / 'none'}, {tmp_path}: no output, without a report.json or a config.json",
        ),
        ([tmp_path / "broken"], "broken/report.json is no report of a job"),
        ([good, tmp_path / "foreign"], "foreign/report.json is no report of a job"),
        ([tmp_path / "list"], "list/report.json is no report of a job"),
        ([good, "--output", "all.pdf"], "all.pdf is no name of a picture"),
        ([silent, "--output", "all.png"], "run the jobs with --eval"),
    ):
        assert end(monkeypatch, "compare", *words) == 1
        error = capsys.readouterr().err
        assert (message in error, error.count("\n")) == (True, 1), error
