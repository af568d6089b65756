"""Figures by block and by kind of linear map, and the picture of them beside the model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distprune.cli.show import Display
from distprune.jobs import OneShotJob, PruneJob, run_one_shot_job, run_prune_job
from distprune.jobs.options import REPORT_NAME
from distprune.jobs.picture import PICTURE_NAME, can_draw, picture
from distprune.jobs.report import PrunedBlocks, Trained
from tests.small_job import block_entry


def drawn(work: Any) -> Any:
    """Return the axes of the picture of a job that did this ``work``."""
    figures: list[Any] = []
    report: Any = SimpleNamespace(work=work, model=Path("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distprune.jobs.picture.png_of", figures.append)
        picture(report)
    (axes,) = figures[0].axes
    return axes


def test_the_picture_has_a_line_for_each_kind() -> None:
    pytest.importorskip("matplotlib")
    experts = {"up.3": 0.2, "up.11": 0.6, "down.3": None}  # are one kind
    blocks = [block_entry(0, {"fc1": 0.1, "fc2": None}), block_entry(2, {"fc1": 0.3, "fc2": 0.4, **experts})]
    walk: Any = SimpleNamespace(method="wanda")
    axes = drawn(PrunedBlocks(walk, "2:4", blocks, 0, {}, "uniform", 100))
    found = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert found["fc1"] == [[0, 0.1], [2, 0.3]]
    assert found["fc2"][1] == [2, 0.4]
    assert found["up.*"] == [[2, pytest.approx(0.4)]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["fc1", "fc2", "up.*", "down.*"]
    assert axes.get_title().startswith("Relative error")
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_the_picture_of_losses() -> None:
    pytest.importorskip("matplotlib")
    axes = drawn(Trained("fine-tuning", 2, 64, 1.0, [3.0, 2.0], 5, 10, 5, 10, 0))
    assert axes.lines[0].get_xydata().tolist() == [[1, 3.0], [2, 2.0]]
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_the_picture_lies_beside_the_model_and_is_not_carried_on(job: OneShotJob, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_one_shot_job(job)
    assert Path(job.output, PICTURE_NAME).read_bytes().startswith(b"\x89PNG\r\n")
    again = PruneJob(model=job.output, output=str(tmp_path / "again"), sparsity=0.6)
    run_prune_job(again)
    assert not (tmp_path / "again" / PICTURE_NAME).exists()


def test_without_matplotlib_the_picture_is_left_out_and_that_is_said_last(
    job: OneShotJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *m: None if name == "matplotlib" else find(name, *m))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run_one_shot_job(job, watcher=Display(visible=True))
    shown = capsys.readouterr().err
    said = f"{PICTURE_NAME} is left out: it needs matplotlib, which is not installed: pip install 'distprune[plot]'\n"
    assert shown.endswith(said)
    assert shown.count(PICTURE_NAME) == 1
    assert not Path(job.output, PICTURE_NAME).exists()
    assert Path(job.output, REPORT_NAME).is_file()


def test_a_picture_that_cannot_be_drawn_does_not_cost_the_model(
    job: OneShotJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    monkeypatch.setattr("distprune.jobs.picture.new_figure", broken)
    assert can_draw(pytest.fail)
    run_one_shot_job(job, watcher=Display(visible=True))
    assert f"{PICTURE_NAME} is left out, drawing it failed: RuntimeError: no fonts\n" in capsys.readouterr().err
    assert not Path(job.output, PICTURE_NAME).exists()
    assert Path(job.output, REPORT_NAME).is_file()
