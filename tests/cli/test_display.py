"""What a person sees of a job: a table, a bar, a log."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from distprune import jobs
from distprune.checkpoint.inspect import InspectReport, TensorReport, inspect_directory
from distprune.cli import show
from distprune.cli.show import Display, summary
from distprune.jobs import (
    FinetuneJob,
    PruneJob,
    run_finetune_job,
    run_one_shot_job,
    run_prune_job,
)
from distprune.jobs.options import REPORT_NAME
from distprune.jobs.picture import mean_error
from distprune.jobs.sample import Sampled
from tests.cli.command import Command
from tests.small_job import STAGES, block_entry, small_job


def lines_of(shown: str) -> list[str]:
    """Return the lines of a summary, if a person can take them in."""
    lines = shown.splitlines()
    assert len(lines) <= 20
    assert all(len(line) <= 80 or line.startswith("  next ") for line in lines), lines
    return lines


def test_the_report_its_summary_and_its_table(
    model_folder: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [str(text_file)] + [str(shutil.copyfile(text_file, tmp_path / f"text{n}.txt")) for n in range(9)]
    Path("dense").symlink_to(model_folder)
    evaluation: dict[str, Any] = {"evaluate_on": tuple(files), "evaluation_tokens": 40, "evaluation_length": 16}
    job = dataclasses.replace(small_job(Path("dense"), text_file, Path()), **evaluation)
    display = Display(visible=True)
    done = run_one_shot_job(job, watcher=display)
    display.show(summary(done))
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    blocks = report["pruning"]["blocks"]
    assert [list(block["seconds"]) for block in blocks] == [STAGES] * 2
    assert all(block["seconds"]["write"] > 0 for block in blocks)
    assert list(report["stage_seconds"]) == ["load", "evaluate", "prune", "save", "total"]
    parts = [report["stage_seconds"][stage] for stage in ("load", "evaluate", "prune", "save")]
    assert all(part > 0 for part in parts)
    assert sum(parts) <= report["stage_seconds"]["total"]
    shown = capsys.readouterr()
    lines = lines_of(shown.out)
    assert lines[0] == "dense, pruned by sparsegpt on 1 rank (cpu)"
    assert lines[1] == f"  sparsity     {done.zeros}"
    assert str(done.zeros) == "50.0 % of 5,760 prunable weights, 40.0 % of all 7,200"
    assert report["zeros"] == {**vars(done.zeros), "sparsity": 0.5}
    before, after = (report[f"perplexity_{when}"][str(text_file)] for when in ("before", "after"))
    assert f"  perplexity on text.txt, in windows of 16 tokens  {before:.2f} -> {after:.2f}" in lines
    assert re.search(r"and \d more lines in report.json", shown.out)
    assert f"  peak memory  {report['peak_memory'][0] / 2**20:,.0f} MiB" in lines
    worst = max((layer for block in blocks for layer in block["layers"]), key=lambda layer: layer["relative_error"])
    assert f"  worst layer  {worst['name']}, relative error {worst['relative_error']:.4f}" in lines
    assert lines[-2:] == [
        "  output       out (report.json there has all)",
        "  next         distprune finetune out --teacher dense --minutes 10 --output out-finetuned",
    ]
    said = [line for line in shown.err.splitlines() if line.startswith("pruned ")]
    assert said == [
        f"pruned model.layers.{i}, {i + 1} of 2 blocks: relative error {mean_error(block['layers']):.4f}"
        for i, block in enumerate(blocks)
    ]
    done = dataclasses.replace(done, num_ranks=2, peak_memory=(3 << 20, 5 << 20), peak_device_memory=(1 << 30, 0))
    display.show(summary(done))
    lines = lines_of(capsys.readouterr().out)
    assert "  peak memory  5 MiB, in the largest of 2 processes" in lines
    assert "  on a device  1,024 MiB, in the largest of 2 processes" in lines


def test_what_comes_next_can_be_run(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = summary(run_prune_job(PruneJob(model=f"{model_folder}/", output="out/", sparsity=0.5)))
    assert lines[-1].endswith("--output out-finetuned")
    lines = summary(Sampled("dense", Path("words"), 4, 256, 1.0))
    assert lines[-1].endswith("--own-words words --sequence-length 256 --output pruned")


def test_the_summary_of_a_fine_tuning(
    model_folder: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pruned = run_prune_job(PruneJob(model=str(model_folder), output="pruned", sparsity=0.5))
    job = FinetuneJob(model="pruned", output="out", data=str(text_file), steps=3, batch_size=2, sequence_length=16)
    display = Display(visible=True)
    report = run_finetune_job(job, watcher=display)
    display.show(summary(report))
    shown, losses = capsys.readouterr(), report.work.losses
    lines = lines_of(shown.out)
    assert report.zeros == pruned.zeros  # one meaning everywhere
    assert lines[:2] == ["pruned, fine-tuned with its zeros held on 1 rank (cpu)", f"  sparsity     {pruned.zeros}"]
    assert f"  loss         {losses[0]:.4f} -> {losses[2]:.4f}" in lines
    assert lines[-1] == "  next         distprune compare pruned out"
    assert [line for line in shown.err.splitlines() if line.startswith("step ")] == [
        f"step {number}: loss {loss:.4f}, {share} done"
        for number, loss, share in zip((1, 2, 3), losses, ("33%", "67%", "100%"), strict=True)
    ]
    assert ("out" / Path("report.png")).exists() == (importlib.util.find_spec("matplotlib") is not None)
    display.show(summary(inspect_directory("out")))
    shown = capsys.readouterr()
    assert lines_of(shown.out)[1] == f"  sparsity     {pruned.zeros}"
    assert re.search(r"[0-9.]+ % +1,120 +2  model.layers.\*.mlp.up_proj.weight", shown.out)


def test_many_kinds_of_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = [
        TensorReport(f"layers.{i}.{kind}", (4,), "float32", 4, 1, ("2:4",))
        for i in (0, 1)
        for kind in "abcdefghijklmnopqrst"
    ]
    Display(visible=True).show(summary(InspectReport("a", tuple(tensors))))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25
    assert lines[1] == "  sparsity     25.0 % of 160 parameters are zero"
    assert "    25.0 %        8        2  layers.*.a  2:4" in lines
    assert "5 more kinds" in lines[-1]


def test_what_a_terminal_would_obey_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    tensor = TensorReport("\x1b[31m[bold]layer\x07", (4,), "float32", 4, 1, ())
    display = Display(visible=True)
    display.show(summary(InspectReport("\x1b]0;title", (tensor,))))
    display.say("block \x1b[31m")
    shown = capsys.readouterr()
    assert r"\x1b[31m[bold]layer\x07" in shown.out
    assert r"\x1b]0;title" in shown.out
    assert all(of.isprintable() or of == "\n" for of in shown.out + shown.err)


def test_a_job_in_a_log_is_alive(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage that takes long says so now and then; a short one, and all under ``TQDM_DISABLE``, say nothing."""
    for waits, is_disabled, shown in ((30, False, ""), (0, True, ""), (0, False, "33%")):
        settings = {"mininterval": waits, "delay": waits, "ascii": True, "disable": is_disabled}
        monkeypatch.setattr(show, "_IN_A_LOG", settings)
        display = Display(visible=True)
        for _ in range(2):
            display.progress("loading", "bytes", 3 << 20, 9 << 20)
        err = capsys.readouterr().err
        assert shown in err if shown else not err
        assert display.stage == "loading"
        display.close()


def test_the_bar_shows_time_left_and_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    display = Display(visible=True)
    display.progress("loading", "bytes", 1 << 20, 2 << 20)
    display.say("said above the bar")
    display.begin("pruning block by block")
    display.block(block_entry(3, {"fc1": 0.25, "fc2": 0.75}), 5)
    display.close()
    shown = capsys.readouterr().err
    assert re.search(r"loading:  50%.* 1\.05M/2\.10M", shown)
    assert "pruned model.layers.3, 4 of 5 blocks: relative error 0.5000\n" in shown
    assert re.search(r"pruning block by block:  80%.* 4/5 \[00:00<", shown)
    assert "\rsaid above the bar\n" in shown


def test_hidden_on_the_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(visible=False)
    display.say("something")
    display.block(block_entry(0, {"fc1": 0.25}), 1)
    display.progress("loading", "bytes", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_a_plan_runs_nothing(
    model_folder: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(jobs.run, "load_model", lambda *_, **__: pytest.fail("the weights are read"))
    line = ["prune", str(model_folder), "--output", str(tmp_path / "out"), "--pattern", "2:4", "--plan"]
    line += ["--calibration", str(text_file), "--sequence-length", "32"]
    before = sorted(model_folder.iterdir())
    for more, told in (
        (["--samples", "all", "--own-words", "0"], " windows on 1 rank: "),
        (["--samples", "5", "--ranks", "64"], ", 101 windows on 64 ranks: "),
    ):
        shown = command(*line, *more).out
        assert all(text in shown for text in (told, "shard of the weights", "gathered block", "sums, factors and fit"))
    assert not any(tmp_path.iterdir())
    assert sorted(model_folder.iterdir()) == before
