"""Outputs of jobs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import distprune as prune
from distprune.jobs import PruneJob, compare_outputs, run_prune_job
from distprune.jobs.options import REPORT_NAME
from distprune.jobs.report import perplexities
from tests.cli.command import Command

ZEROS = "50.0 % of 2 prunable weights, 0.0 % of all 4.0 M"


def write(path: Path, *, zeros: float = 0.5, after: dict[str, Any] | None = None, **more: Any) -> Path:
    """Write a report like that of a job into ``path``."""
    path.mkdir()
    known = {"num_zeros": 1, "num_prunable": 2, "num_parameters": 4_000_000, "sparsity": zeros}
    arguments = {"evaluation_tokens": 64, "evaluation_length": 16, "pattern": "unstructured"}
    after = {"/data/t.txt": 20.0} if after is None else after
    report = {
        "arguments": arguments,
        "zeros": known,
        "perplexity_before": dict.fromkeys(after, 10.0),
        "perplexity_after": after,
        "tasks_before": {},
        "tasks_after": {},
        "stage_seconds": {"total": 1.25, "prune": 1.0},
        "peak_memory": [3 << 20],
        "peak_device_memory": [],
        **(more or {"pruning": {"score": "magnitude", "pattern": "unstructured"}}),
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
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text()) == json.loads(json.dumps(report.to_dict()))
    (output,) = compare_outputs([tmp_path / "out"]).outputs
    assert (output.share, output.method, output.is_trained) == (0.5, "magnitude, 2:4", False)
    perplexity = (report.before.perplexity[str(text_file)], report.after.perplexity[str(text_file)])
    assert output.perplexity == {f"{text_file}, 8,192 tokens in windows of 16": perplexity}
    assert ("sparsity", str(report.zeros)) in output.rows


def test_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """Figure by figure, with a line for each output; texts by whole paths, and by how much of them was run.

    What a terminal would obey is shown.
    """
    monkeypatch.chdir(tmp_path)
    report = json.loads((write(Path("half")) / REPORT_NAME).read_text())
    for when, metric in (("before", 20.0), ("after", "inf")):
        report[f"tasks_{when}"] = {"wikitext": {"word_perplexity": metric}}
    Path("half", REPORT_NAME).write_text(json.dumps(report))
    write(Path("other"), after={"/else/\x1b[31mt.txt": 15.0, "/data/t.txt": "inf"})
    report = json.loads((write(Path("longer")) / REPORT_NAME).read_text())
    report["arguments"]["evaluation_length"] = 32
    Path("longer", REPORT_NAME).write_text(json.dumps(report))
    alike = write(Path("alike"), after=dict.fromkeys(["/else/t.txt", "/data/t.txt", "/data/u.txt"], 1.0))
    names = [*perplexities(json.loads((alike / REPORT_NAME).read_text()))]  # as the summary and the card have them
    assert names == [f"{end}, in windows of 16 tokens" for end in ("else/t.txt", "data/t.txt", "u.txt")]
    lines = command("compare", "half", "other", "longer").out.splitlines()
    assert lines[:4] == ["sparsity", *(f"  {name:<6}  {ZEROS}" for name in ("half", "other", "longer"))]
    assert lines[4:6] == ["method", "  half    magnitude"]
    assert lines[-9:] == [
        "perplexity on /data/t.txt, 64 tokens in windows of 16",
        "  half    10.00 -> 20.00",
        "  other   10.00 -> inf",
        "word_perplexity on wikitext",
        "  half    20.0000 -> inf",
        r"perplexity on /else/\x1b[31mt.txt, 64 tokens in windows of 16",
        "  other   10.00 -> 15.00",
        "perplexity on /data/t.txt, 64 tokens in windows of 32",
        "  longer  10.00 -> 20.00",
    ]
    write(Path("silent"), after={})
    assert str(compare_outputs(["silent"])).endswith("(no perplexities: run the jobs with --eval)")


def test_models_that_no_job_has_written(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
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
    assert num_left < num_before
    assert compare_outputs(["half"]).outputs[0].share == 0.5
    name, half, small, *_, last = command("compare", "half", "smaller").out.splitlines()
    assert name == "sparsity"
    assert half.startswith("  half     50.0 % of ")
    assert half.endswith(f"of all {num_before:,}")
    assert small.endswith(f"of all {num_left:,}")  # weights of tests are rounded, some to zero
    assert last == "(no perplexities: run the jobs with --eval)"


def test_the_picture(tmp_path: Path, command: Command) -> None:
    pytest.importorskip("matplotlib")
    outputs = [
        write(tmp_path / "b", zeros=0.5),
        write(tmp_path / "a", zeros=0.25, after={"/data/t.txt": 12.0, "/data/u.txt": 1000.0}),
        write(tmp_path / "c", zeros=0.5, after={"/data/u.txt": 14.0}, pruning={"score": "admm", "pattern": "2:4"}),
    ]
    first, second = compare_outputs(outputs).draw().axes
    assert first.get_title() == "Perplexity on /data/t.txt, 64 tokens in windows of 16"
    lines = {line.get_label(): line.get_xydata().tolist() for line in first.lines if line.get_label() != "before"}
    assert lines == {"magnitude": [[0.25, 12.0], [0.5, 20.0]]}
    assert (first.get_yscale(), second.get_yscale()) == ("linear", "log")
    assert {line.get_label() for line in second.lines} == {"magnitude", "admm", "before"}
    assert "perplexity on " in command("compare", *outputs, "--output", tmp_path / "all.png").out
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG\r\n")


DAMAGES: dict[str, tuple[str, Any]] = {
    "a sparsity": ("zeros", {"sparsity": "half", "num_parameters": 1}),
    "seconds": ("stage_seconds", {"total": None}),
    "perplexities": ("perplexity_after", ["t.txt"]),
    "a number too large": ("perplexity_after", {"t.txt": 10**400}),
    "nothing before": ("removal", {"method": "obs", "num_parameters": 1, "num_parameters_before": 0}),
}


def test_errors_name_what_is_wrong(tmp_path: Path, command: Command) -> None:
    good, silent = write(tmp_path / "good"), write(tmp_path / "silent", after={})
    report = json.loads((good / REPORT_NAME).read_text())
    texts = {name: json.dumps({**report, key: value}) for name, (key, value) in DAMAGES.items()}
    texts |= {"broken": "{", "foreign": "{}", "list": "[]"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / REPORT_NAME).write_text(text)
    named: list[Any] = [([good, tmp_path / name], f"{name}/report.json is no report of a job") for name in texts]
    for words, message in (
        *named,
        (
            [good, tmp_path / "none", tmp_path],
            f"error: {tmp_path / 'none'}, {tmp_path}: no output, without a report.json or a config.json",
        ),
        ([good, "--output", "all.pdf"], "all.pdf is no name of a picture"),
        ([silent, "--output", "all.png"], "run the jobs with --eval"),
    ):
        error = command("compare", *words, code=1).err
        assert (message in error, error.count("\n")) == (True, 1), error
