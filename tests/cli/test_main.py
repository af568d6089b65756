"""What the command line accepts, what it passes on, and how it ends."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from typer.testing import CliRunner

from distprune.cli import main
from distprune.cli.commands import JobCommand
from distprune.jobs import FinetuneJob, OneShotJob, PlanJob, PruneJob, ShrinkJob, StreamedJob
from distprune.version import __version__


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


def asked(line: str) -> list[JobCommand]:
    """Return what this command line asks for."""
    requests: list[JobCommand] = []
    assert CliRunner().invoke(main.app, line.split(), obj=requests.append).exit_code == 0
    return requests


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert end(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"distprune {__version__}\n"


def test_defaults() -> None:
    assert asked("prune m --output o --sparsity 0.5") == [
        JobCommand(PruneJob(model="m", output="o", sparsity=0.5), "auto", 600)
    ]
    assert asked("prune m --output o --sparsity 0.5 --calibration t") == [
        JobCommand(OneShotJob(model="m", output="o", method="admm", sparsity=0.5, calibration="t"), "auto", 600)
    ]
    assert asked("prune m --output o --pattern 2:4 --streamed --resume --include *.q") == [
        JobCommand(StreamedJob(model="m", output="o", pattern="2:4", resume=True, include=("*.q",)), "cpu", 600)
    ]
    assert asked("finetune m --output o --data d --steps 3") == [
        JobCommand(FinetuneJob(model="m", output="o", data="d", steps=3), "auto", 600)
    ]
    assert asked("shrink m --output o --calibration c --mlp 0.75") == [
        JobCommand(ShrinkJob(model="m", output="o", calibration="c", mlp=0.75), "auto", 600)
    ]


def test_patterns_without_calibration() -> None:
    for line, job in (
        ("--pattern 2:4", PruneJob(model="m", output="o", pattern="2:4")),
        (
            "--pattern block:16 --sparsity 0.5 --scope tensor",
            PruneJob(model="m", output="o", scope="tensor", sparsity=0.5, pattern="block:16"),
        ),
    ):
        assert [request.job for request in asked(f"prune m --output o {line}")] == [job]


def test_every_option_arrives() -> None:
    line = (
        "m --output o --seed 7 --dtype bfloat16 --device cpu --overwrite --eval t.txt --eval u.jsonl "
        "--eval-tokens 64 --eval-length 16 --tasks a,b --tasks c --timeout 30"
    )
    common: dict[str, Any] = {
        "model": "m",
        "output": "o",
        "seed": 7,
        "dtype": torch.bfloat16,
        "overwrite": True,
        "evaluate_on": ("t.txt", "u.jsonl"),
        "evaluation_tokens": 64,
        "evaluation_length": 16,
        "tasks": ("a", "b", "c"),
    }
    in_place = " --sparsity 0.12 --method random --scope tensor --include *a --include *b --exclude *c"
    job = PruneJob(**common, method="random", scope="tensor", sparsity=0.12, include=("*a", "*b"), exclude=("*c",))
    assert asked(f"prune {line}{in_place}") == [JobCommand(job, "cpu", 30)]
    one_shot = " --method wanda --pattern row --sparsity 0.5 --calibration c --samples 3 --sequence-length 9 --offload"
    one_shot += " --sequential layer --targets dense --target-share 0.25"
    one_shot += " --allocation gradients"
    calibrated = OneShotJob(
        **common,
        method="wanda",
        sequential="layer",
        targets="dense",
        target_share=0.25,
        sparsity=0.5,
        pattern="row",
        calibration="c",
        samples=3,
        sequence_length=9,
        allocation="gradients",
        offload=True,
        resume=True,
    )
    assert asked(f"prune {line}{one_shot} --resume") == [JobCommand(calibrated, "cpu", 30)]
    (planned,) = asked(f"prune {line}{one_shot} --resume --plan --ranks 64 --device-memory 79.5G")
    assert planned.job == PlanJob(**vars(calibrated), ranks=64, device_memory=159 << 29)
    everything = f"prune {line}{one_shot.replace('--samples 3', '--samples all')} --resume"
    assert asked(everything) == [JobCommand(dataclasses.replace(calibrated, samples=None), "cpu", 30)]
    training = (
        "--data d --minutes 1.5 --teacher t --learning-rate 0.1 --batch-size 2 --sequence-length 9 --save-every 5 "
        "--compute-dtype float32 --resume"
    )
    tuned = FinetuneJob(
        **common,
        data="d",
        minutes=1.5,
        teacher="t",
        learning_rate=0.1,
        batch_size=2,
        sequence_length=9,
        save_every=5,
        compute_dtype=torch.float32,
        resume=True,
    )
    assert asked(f"finetune {line} {training}") == [JobCommand(tuned, "cpu", 30)]
    removal = (
        "--calibration c --mlp 1.0 --heads 6 --layers 24 --parameters 5M --criterion fluctuation "
        "--layer-criterion influence --refit bias --targets dense --target-share 0.25 "
        "--samples all --sequence-length 9 --offload --no-speed --resume"
    )
    smaller = ShrinkJob(
        **common,
        calibration="c",
        mlp=1.0,
        heads=6,
        layers=24,
        parameters=5_000_000,
        criterion="fluctuation",
        layer_criterion="influence",
        refit="bias",
        targets="dense",
        target_share=0.25,
        samples=None,
        sequence_length=9,
        offload=True,
        speed=False,
        resume=True,
    )
    assert asked(f"shrink {line} {removal}") == [JobCommand(smaller, "cpu", 30)]
    (request,) = asked("shrink m --output o --calibration c --kv-groups 2")
    assert isinstance(request.job, ShrinkJob)
    assert (request.job.kv_groups, type(request.job.kv_groups)) == (2, int)  # two of them, and not a share of 2.0
    for said, meant in (("100M", 100_000_000), ("0.8B", 800_000_000), ("1.2345K", 1234), ("7000", 7000), ("0.8", 0.8)):
        (request,) = asked(f"shrink m --output o --calibration c --parameters {said}")
        assert isinstance(request.job, ShrinkJob)
        assert (request.job.parameters, type(request.job.parameters)) == (meant, type(meant))


@pytest.mark.parametrize(
    "line",
    [
        "prune",
        "prune m --sparsity 0.3",
        "prune m --output o",
        "prune m --output o --sparsity half",
        "prune m --output o --sparsity 1.5",
        "prune m --output o --sparsity nan",
        "prune m --output o --pattern column --sparsity 0.5",
        "prune m --output o --pattern 4:2",
        "prune m --output o --amount 0.3",
        "prune m --output o --sparsity 0.3 --scope row",
        "prune m --output o --sparsity 0.3 --pattern 2:4",
        "prune m --output o --pattern row",
        "prune m --output o --pattern 2:4 --method wanda --calibration c --samples 0",
        "prune m --output o --pattern 2:4 --method wanda --calibration c --samples many",
        "prune m --output o --sparsity 0.3 --resume",
        "prune m --output o --sparsity 0.3 --allocation uniform",
        "prune m --output o --sparsity 0.3 --calibration t --allocation owl",
        "prune m --output o --sparsity 0.3 --calibration t --scope tensor",
        "prune m --output o --sparsity 0.3 --calibration t --streamed",
        "prune m --output o --sparsity 0.3 --streamed --device cuda",
        "prune m --output o --sparsity 0.3 --no-sync-files",
        "prune m --output o --sparsity 0.3 --streamed --eval t",
        "prune m --output o --sparsity 0.3 --streamed --dtype float16",
        # options that say nothing without others
        "prune m --output o --sparsity 0.3 --targets dense",
        "prune m --output o --sparsity 0.3 --target-share 0.3",
        "prune m --output o --sparsity 0.3 --sequential layer",
        "prune m --output o --sparsity 0.3 --samples 16",
        "prune m --output o --sparsity 0.3 --sequence-length 16",
        "prune m --output o --sparsity 0.3 --offload",
        "prune m --output o --sparsity 0.3 --streamed --samples 16",
        "prune m --output o --sparsity 0.3 --eval-length 16",
        "prune m --output o --sparsity 0.3 --eval-tokens 16",
        "prune m --output o --sparsity 0.3 --calibration t --target-share 7",
        "prune m --output o --sparsity 0.3 --calibration t --target-share 0.3 --targets own",
        "prune m --output o --sparsity 0.3 --calibration t --target-share 0.3 --method wanda",
        "shrink m --output o --calibration c --mlp 0.5 --target-share 0.3 --targets own",
        "shrink m --output o --calibration c --mlp 0.5 --target-share 0.3 --refit none",
        "shrink m --output o --calibration c --mlp 0.5 --layer-criterion loss",
        "shrink m --output o --calibration c --mlp 0.5 --expert-criterion usage",
        "shrink m --output o --calibration c --mlp 0.5 --target-share 2",
        "prune m --output o --sparsity 0.3 --calibration t --no-sync-files",
        "prune m --output o --sparsity 0.3 --plan",
        "prune m --output o --sparsity 0.3 --ranks 8",
        "prune m --output o --sparsity 0.3 --calibration t --ranks 8",
        "prune m --output o --sparsity 0.3 --calibration t --plan --ranks 0",
        "prune m --output o --sparsity 0.3 --calibration t --plan --device-memory 80X",
        "prune m --output o --sparsity 0.3 --calibration t --plan --streamed",
        "prune m --output o --sparsity 0.3 --dtype int8",
        "prune m --output o --sparsity 0.3 --eval-length 1",
        "prune m --output o --sparsity 0.3 --eval-tokens 10000000000000000000000",
        "prune m --output o --sparsity 0.3 --timeout 0",
        "prune m --output o --sparsity 0.3 --timeout inf",
        "prune m --output o --sparsity 0.3 --timeout nan",
        "prune m --output o --sparsity 0.3 --timeout 1e300",
        "finetune m --output o --data d",
        "finetune m --output o --data d --steps 1 --minutes 1",
        "finetune m --output o --data d --minutes 0",
        "finetune m --output o --data d --minutes nan",
        "finetune m --output o --data d --steps 1 --learning-rate 0",
        "finetune m --output o --data d --steps 1 --batch-size 0",
        "finetune m --output o --data d --steps 1 --timeout 0",
        "finetune m --output o --steps 1",
        "shrink m --output o --mlp 0.5 --own-words 2",
        "shrink m --output o --mlp 0.5 --samples all",
        "prune m --output o --sparsity 0.3 --method wanda --own-words 0",
        "prune m --output o --sparsity 0.3 --method wanda --scope tensor",
        "prune m --output o --sparsity 0.3 --calibration t --own-words 0 --own-words-file w",
        "finetune m --output o --steps 1 --teacher t --data d --samples 3",
        "sample m",
        "sample m --output o --sequence-length 1",
        "sample m --output o --eval t",
        "shrink m --output o --calibration c",
        "shrink m --output o --calibration c --mlp 1.5",
        "shrink m --output o --calibration c --mlp 0",
        "shrink m --output o --calibration c --mlp -3",
        "shrink m --output o --calibration c --mlp half",
        "shrink m --output o --calibration c --mlp nan",
        "shrink m --output o --calibration c --heads 2 --kv-groups 2",
        "shrink m --output o --calibration c --parameters 1.5",
        "shrink m --output o --calibration c --parameters 100m",
        "shrink m --output o --calibration c --parameters M",
        "shrink m --output o --calibration c --parameters 0",
        "shrink m --output o --calibration c --parameters nan",
        "shrink m --output o --calibration c --mlp 0.5 --criterion best",
        "shrink m --output o --calibration c --mlp 0.5 --timeout 0",
        "inspect",
        "sharpen m",
        "",
    ],
)
def test_wrong_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> None:
    monkeypatch.setattr(main, "_work", lambda *_: pytest.fail("a job was started"))
    assert end(monkeypatch, *line.split()) == 2
    captured = capsys.readouterr()
    assert "Usage:" in captured.err + captured.out
    assert "Traceback" not in captured.err


def test_prunes_and_inspects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: Path
) -> None:
    output = tmp_path / "out"
    assert end(monkeypatch, "prune", model_folder, "--output", output, "--sparsity", "0.25", "--scope", "tensor") == 0
    shown = capsys.readouterr().out
    assert "magnitude" in shown
    assert "magnitude, unstructured, each tensor by itself" in shown
    assert end(monkeypatch, "inspect", output, "--json") == 0
    inspected = json.loads(capsys.readouterr().out)
    zeros = {tensor["name"]: tensor["num_zeros"] for tensor in inspected["tensors"]}
    assert zeros["model.layers.1.mlp.up_proj.weight"] == 28 * 20 // 4
    assert end(monkeypatch, "inspect", output, "--verbose") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in zeros)  # none is cut to fit a screen that is not there
    assert f"{inspected['num_zeros']:,}" in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{model}/nothing --output {out}", "there is no model directory"),
        ("{model} --output {out} --include *.q", "'*.q' matches no parameter"),
        ("{model} --output {model}", "lie inside each other"),
        ("{model} --output {model} --overwrite", "lie inside each other"),
        ("{model} --output {out} --eval {out}.txt", "there is no text file"),
        ("{model} --output {out} --eval {text} --eval-length 9000", "one window of 9000"),
        ("{model} --output {out} --eval {text} --eval {model}", "there is no text file"),
        ("org/name@v1 --output {out}", "hf download org/name --revision v1"),
        ("{model} --output {out} --tasks arc_easy", "pip install 'distprune[tasks]'"),
        ("{model} --output {text}/out", "is a file"),
        ("{model} --output {out}/new/er", "cannot be made: there is no directory {out}"),
        ("{loop} --output {out}", "loop"),
        ("{model} --output {loop}/out", "loop"),
        ("{model} --output {out} --eval {loop}", "loop"),
        ("{model} --output {out} --calibration {loop}", "loop"),
    ],
)
def test_a_mistake_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    model_folder: Path,
    text_file: Path,
    line: str,
    message: str,
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(model_folder.parent / "error.json"))
    places = {"model": model_folder, "out": tmp_path / "out", "text": text_file, "loop": tmp_path / "loop"}
    enough = [] if "--sparsity" in line else ["--sparsity", "0.3"]
    assert end(monkeypatch, "prune", *line.format(**places).split(), *enough) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message.format(**places) in error
    assert error.count("\n") == 1
    assert json.loads((model_folder.parent / "error.json").read_text())["message"]["message"] == error.strip()
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_inspecting_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert end(monkeypatch, "inspect", tmp_path / "nothing") == 1
    assert capsys.readouterr().err.startswith("error: there is no model directory")


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    monkeypatch.setitem(main._RUN, PruneJob, fail)


LINE = ("prune", "m", "--output", "o", "--sparsity", "0.3")


def test_what_nobody_expected_gets_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_with(monkeypatch, RuntimeError("connection reset by peer"))
    assert end(monkeypatch, *LINE) == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.endswith("RuntimeError: connection reset by peer\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(143), 143),
        (KeyboardInterrupt(), 130),
        (SystemExit(0), 1),
        (SystemExit(None), 1),
        (SystemExit("no"), 1),
    ],
)
def test_what_ends_a_job_is_never_taken_for_a_success(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    fail_with(monkeypatch, error)
    assert end(monkeypatch, *LINE) == code


def test_a_table_that_cannot_be_shown_does_not_change_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main._RUN, PruneJob, lambda *_, **__: {})  # no report: the table fails
    assert end(monkeypatch, *LINE) == 0
