"""What a one-shot job shows: progress, a table, and a picture beside the model."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distprune import Unstructured
from distprune.cli import picture
from distprune.cli.display import Display
from distprune.cli.launchers import Ranks
from distprune.cli.one_shot_figures import kinds_of, mean_error
from distprune.cli.one_shot_job import OneShotJob, run_one_shot_job
from distprune.cli.picture import PICTURE_NAME, can_draw, draw
from distprune.cli.prune_job import PruneJob, run_job
from distprune.cli.steps import REPORT_NAME
from distprune.collectives import communicator

RANKS = Ranks(communicator(), torch.device("cpu"), None)
STAGES = ["forward", "reduce", "factor", "sweep", "write"]


@pytest.fixture
def job(model_folder: Path, text_file: Path, tmp_path: Path) -> OneShotJob:
    output = str(tmp_path / "out")
    return OneShotJob(
        str(model_folder), output, "sparsegpt", Unstructured(0.5), str(text_file), samples=3, sequence_length=16
    )


def block(index: int, errors: dict[str, float | None]) -> dict[str, Any]:
    name = f"model.layers.{index}"
    maps = [
        {"name": f"{name}.{of_map}", "num_elements": 10, "num_zeros": 4 + index, "relative_error": error}
        for of_map, error in errors.items()
    ]
    seconds = dict.fromkeys(STAGES, 0.5)
    return {"index": index, "name": name, "maps": maps, "seconds": seconds, "num_rounds": 7, "num_bytes": 3 << 20}


EXPERTS = {"self_attn.q_proj": 0.1, "experts.up.0": 0.2, "experts.up.11": 0.6, "experts.down.0": None, "fc1": 0.3}


def test_experts_are_one_kind() -> None:
    kinds = {kind.name: kind for kind in kinds_of(block(1, EXPERTS))}
    assert list(kinds) == ["self_attn.q_proj", "experts.up.*", "experts.down.*", "fc1"]
    assert kinds["experts.up.*"].errors == (0.2, 0.6)
    assert kinds["experts.up.*"].error == pytest.approx(0.4)
    assert kinds["experts.up.*"].sparsity == 0.5
    assert kinds["experts.down.*"].error is None
    assert mean_error(block(1, EXPERTS)) == pytest.approx(0.3)
    assert mean_error(block(1, {"a": None})) is None


def test_the_report_and_its_table(
    job: OneShotJob, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = dataclasses.replace(job, evaluate_on=str(text_file), evaluation_tokens=200, evaluation_length=16)
    run_one_shot_job(job, RANKS, Display(visible=True))
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
        for of_map in of_block["maps"]:
            assert of_map["name"].removeprefix(f"{of_block['name']}.") in shown.out
            assert f"{of_map['relative_error']:.4f}" in shown.out
    assert all(f"{stage} s" in shown.out for stage in STAGES)
    assert f"{report['perplexity_before']:.2f} -> {report['perplexity_after']:.2f}" in shown.out
    assert f"peak memory of the ranks: {report['pruning']['peak_memory'][0] / 2**20:.0f} MiB" in shown.out
    lines = [line for line in shown.err.splitlines() if line.startswith("pruned ")]
    assert len(lines) == 2
    assert f"pruned model.layers.0, 1 of 2 blocks: relative error {mean_error(blocks[0]):.4f}, " in lines[0]
    assert lines[1].endswith("00:00 left")


def test_the_bar_shows_time_left_and_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Display(visible=True).block_progress(3, 5) as progress:
        progress(block(3, {"fc1": 0.25, "fc2": 0.75}))
    shown = capsys.readouterr().err
    assert "4/5 [00:00<00:00" in shown
    assert "error 0.5000" in shown
    assert "pruned" not in shown


def test_hidden_on_the_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(visible=False).block_progress(0, 1) as progress:
        progress(block(0, {"fc1": 0.25}))
    assert capsys.readouterr() == ("", "")


def test_the_picture_has_a_line_for_each_kind() -> None:
    pytest.importorskip("matplotlib")
    figure = draw([block(0, {"fc1": 0.1, "fc2": None}), block(2, {"fc1": 0.3, "fc2": 0.4, "up.3": 0.5})], "a title")
    errors, sparsities = figure.axes
    found = {line.get_label(): line.get_xydata().tolist() for line in errors.lines}
    assert found["fc1"] == [[0, 0.1], [2, 0.3]]
    assert found["fc2"][1] == [2, 0.4]
    assert found["up.*"] == [[2, 0.5]]
    assert {line.get_label(): line.get_xydata().tolist() for line in sparsities.lines} == {
        "fc1": [[0, 0.4], [2, 0.6]],
        "fc2": [[0, 0.4], [2, 0.6]],
        "up.*": [[2, 0.6]],
    }
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fc1", "fc2", "up.*"]


def test_the_picture_lies_beside_the_model_and_is_not_carried_on(job: OneShotJob, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_one_shot_job(job, RANKS, Display(visible=False))
    assert (tmp_path / "out" / PICTURE_NAME).read_bytes().startswith(b"\x89PNG\r\n")
    assert not (tmp_path / "out" / "journal.json").exists()
    again = PruneJob(job.output, str(tmp_path / "again"), "magnitude", "global", 0.6, 0)
    run_job(again, RANKS, Display(visible=False))
    assert not (tmp_path / "again" / PICTURE_NAME).exists()


def test_without_matplotlib_the_picture_is_left_out_and_that_is_said_first(
    job: OneShotJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *m: None if name == "matplotlib" else find(name, *m))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run_one_shot_job(job, RANKS, Display(visible=True))
    shown = capsys.readouterr().err
    assert shown.startswith(
        f"{PICTURE_NAME} is left out: it needs matplotlib, which is not installed: pip install 'dis"
    )
    assert "distprune[plot]" in shown
    assert shown.count(PICTURE_NAME) == 1
    assert not (tmp_path / "out" / PICTURE_NAME).exists()
    assert (tmp_path / "out" / REPORT_NAME).is_file()


def test_a_picture_that_cannot_be_drawn_does_not_cost_the_model(
    job: OneShotJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    monkeypatch.setattr(picture, "draw", broken)
    assert can_draw(pytest.fail)
    run_one_shot_job(job, RANKS, Display(visible=True))
    assert f"{PICTURE_NAME} is left out, drawing it failed: RuntimeError: no fonts\n" in capsys.readouterr().err
    assert not (tmp_path / "out" / PICTURE_NAME).exists()
    assert (tmp_path / "out" / REPORT_NAME).is_file()
