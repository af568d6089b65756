"""What a person sees of a job: a table, a bar, a log."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from distprune import jobs
from distprune.cli.display import Display
from distprune.jobs import (
    FinetuneJob,
    OneShotJob,
    PruneJob,
    run_finetune_job,
    run_one_shot_job,
    run_prune_job,
)
from distprune.jobs.figures import mean_error
from distprune.jobs.run import REPORT_NAME
from tests.cli.test_main import end
from tests.small_job import STAGES, block_entry, small_job


@pytest.fixture
def job(model_folder: Path, text_file: Path, tmp_path: Path) -> OneShotJob:
    return small_job(model_folder, text_file, tmp_path)


def test_the_report_and_its_table(
    job: OneShotJob, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = dataclasses.replace(job, evaluate_on=(str(text_file),), evaluation_tokens=200, evaluation_length=16)
    display = Display(visible=True)
    display.summary(run_one_shot_job(job, watcher=display))
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    blocks = report["pruning"]["blocks"]
    assert [list(block["seconds"]) for block in blocks] == [STAGES] * 2
    assert all(block["seconds"]["write"] > 0 for block in blocks)
    assert list(report["stage_seconds"]) == ["load", "evaluate", "prune", "save", "total"]
    parts = [report["stage_seconds"][stage] for stage in ("load", "evaluate", "prune", "save")]
    assert all(part > 0 for part in parts)
    assert sum(parts) <= report["stage_seconds"]["total"]
    shown = capsys.readouterr()
    for of_block in blocks:
        assert of_block["name"] in shown.out
        assert f"{mean_error(of_block):.4f}" in shown.out
        for of_layer in of_block["layers"]:
            assert of_layer["name"].removeprefix(f"{of_block['name']}.") in shown.out
            assert f"{of_layer['relative_error']:.4f}" in shown.out
    assert all(f"{stage} s" in shown.out for stage in STAGES)
    (before,), (after,) = (report[f"perplexity_{when}"].values() for when in ("before", "after"))
    assert re.search(rf"perplexity on text.txt, in windows of 16 tokens\W+{before:.2f} -> {after:.2f}", shown.out)
    assert re.search(rf"peak memory\W+{report['pruning']['peak_memory'][0] / 2**20:.0f} MiB", shown.out)
    lines = [line for line in shown.err.splitlines() if line.startswith("pruned ")]
    assert len(lines) == 2
    assert f"pruned model.layers.0, 1 of 2 blocks: relative error {mean_error(blocks[0]):.4f}, " in lines[0]
    assert lines[1].endswith("00:00 left")


def test_the_table_of_a_fine_tuning(
    model_folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pruned, tuned = tmp_path / "pruned", tmp_path / "out"
    run_prune_job(PruneJob(model=str(model_folder), output=str(pruned), sparsity=0.5))
    job = FinetuneJob(
        model=str(pruned), output=str(tuned), data=str(text_file), steps=3, batch_size=2, sequence_length=16
    )
    display = Display(visible=True)
    report = run_finetune_job(job, watcher=display)
    display.summary(report)
    shown, losses = capsys.readouterr(), report.work.losses
    assert re.search(r"training\W+3 steps, 96 tokens, \d+ s", shown.out)
    assert f"{losses[0]:.4f} -> {losses[2]:.4f}" in shown.out
    assert [line for line in shown.err.splitlines() if line.startswith("step ")] == [
        f"step {number}: loss {loss:.4f}, {share} done"
        for number, loss, share in zip((1, 2, 3), losses, ("33%", "67%", "100%"), strict=True)
    ]
    assert (tuned / "report.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_the_bar_shows_time_left_and_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    display = Display(visible=True)
    display.progress("loading", "bytes", 1 << 20, 2 << 20)
    display.block(block_entry(3, {"fc1": 0.25, "fc2": 0.75}), 5)
    display.close()
    shown = capsys.readouterr().err
    assert "loading:   0%|          | 0.00/2.10M" in shown
    assert "4/5 [00:00<00:00" in shown
    assert "error 0.5000" in shown
    assert "pruned" not in shown


def test_hidden_on_the_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(visible=False)
    display.say("something")
    display.block(block_entry(0, {"fc1": 0.25}), 1)
    display.progress("loading", "bytes", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_plan_runs_nothing(
    model_folder: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(jobs.run, "load_model", lambda *_, **__: pytest.fail("the weights are read"))
    line = ["prune", str(model_folder), "--output", str(tmp_path / "out"), "--pattern", "2:4"]
    line += ["--calibration", str(text_file)]
    before = sorted(model_folder.iterdir())
    for more, told in (
        (["--samples", "all", "--sequence-length", "32"], ["ranks │ 1, on the host each", "fits │ yes"]),
        (["--samples", "5", "--sequence-length", "32"], ["own words │ 96 windows, written in "]),
        (
            ["--ranks", "64", "--device-memory", "80G"],
            ["ranks │ 64, on a device each", "80 GiB on a device", "fits │ yes"],
        ),
        (["--ranks", "64", "--device-memory", "1K"], ["fits │ no"]),
    ):
        assert end(monkeypatch, *line, "--plan", *more) == 0
        shown = re.sub(" +", " ", capsys.readouterr().out)
        assert "planned, nothing was run" in shown
        assert "│ sums │" in shown
        assert all(text in shown for text in told), (told, shown)
    assert not any(tmp_path.iterdir())
    assert sorted(model_folder.iterdir()) == before
