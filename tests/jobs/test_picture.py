"""Figures by block and by kind of linear map, and the picture of them beside the model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distprune.cli.display import Display
from distprune.jobs import OneShotJob, PruneJob, run_one_shot_job, run_prune_job
from distprune.jobs.figures import kinds_of, mean_error
from distprune.jobs.picture import PICTURE_NAME, can_draw, draw_blocks, draw_losses, draw_removal
from distprune.jobs.run import REPORT_NAME
from tests.small_job import block_entry, small_job


@pytest.fixture
def job(model_folder: Path, text_file: Path, tmp_path: Path) -> OneShotJob:
    return small_job(model_folder, text_file, tmp_path)


EXPERTS = {"self_attn.q_proj": 0.1, "experts.up.0": 0.2, "experts.up.11": 0.6, "experts.down.0": None, "fc1": 0.3}


def test_experts_are_one_kind() -> None:
    kinds = {kind.name: kind for kind in kinds_of(block_entry(1, EXPERTS))}
    assert list(kinds) == ["self_attn.q_proj", "experts.up.*", "experts.down.*", "fc1"]
    assert kinds["experts.up.*"].errors == (0.2, 0.6)
    assert kinds["experts.up.*"].error == pytest.approx(0.4)
    assert kinds["experts.up.*"].sparsity == 0.5
    assert kinds["experts.down.*"].error is None
    assert mean_error(block_entry(1, EXPERTS)) == pytest.approx(0.3)
    assert mean_error(block_entry(1, {"a": None})) is None


def test_the_picture_has_a_line_for_each_kind() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_blocks(
        [block_entry(0, {"fc1": 0.1, "fc2": None}), block_entry(2, {"fc1": 0.3, "fc2": 0.4, "up.3": 0.5})], "a title"
    )
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
    assert [text.get_text() for text in errors.get_legend().get_texts()] == ["fc1", "fc2", "up.*"]
    assert sparsities.get_legend() is None
    assert all(tick == round(tick) for tick in sparsities.get_xticks())
    (errors,) = draw_blocks([block_entry(0, {"fc1": 0.1, "fc2": 0.2})], "all layers are as sparse").axes
    assert errors.get_title().startswith("Relative error")


def test_the_picture_of_a_smaller_model() -> None:
    pytest.importorskip("matplotlib")
    kept = [{"kind": "mlp", "num": 6, "num_before": 8}, {"kind": "mlp", "num": 2, "num_before": 8}]
    blocks = [
        {**block_entry(0, {"fc1": 0.1}), "kept": kept},
        {**block_entry(2, {"fc1": 0.2}), "kept": [{"kind": "heads", "num": 1, "num_before": 4}]},
    ]
    work: Any = SimpleNamespace(layers=[0, 2], num_layers_before=3, blocks=blocks)
    stays, errors = draw_removal(work, "a title").axes
    heights = [bar.get_height() for bar in stays.patches]
    assert heights == [1, 1, 1, 0.5, 0, 1, 1, 1, 1, 1, 0, 0.25]  # before and after, kind by kind
    assert [text.get_text() for text in stays.get_legend().get_texts()] == ["mlp, 8 of 16", "heads, 1 of 4"]
    assert [line.get_xydata().tolist() for line in errors.lines] == [[[0, 0.1], [2, 0.2]]]
    work.blocks = [{**block_entry(index, {}), "kept": []} for index in (0, 2)]
    (stays,) = draw_removal(work, "layers alone").axes
    assert [bar.get_height() for bar in stays.patches] == [1, 1, 1, 1, 0, 1]


def test_the_picture_of_losses() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = draw_losses([3.0, 2.0], "a title").axes
    assert axes.lines[0].get_xydata().tolist() == [[1, 3.0], [2, 2.0]]
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_the_picture_lies_beside_the_model_and_is_not_carried_on(job: OneShotJob, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_one_shot_job(job)
    assert (tmp_path / "out" / PICTURE_NAME).read_bytes().startswith(b"\x89PNG\r\n")
    again = PruneJob(model=job.output, output=str(tmp_path / "again"), sparsity=0.6)
    run_prune_job(again)
    assert not (tmp_path / "again" / PICTURE_NAME).exists()


def test_without_matplotlib_the_picture_is_left_out_and_that_is_said_last(
    job: OneShotJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *m: None if name == "matplotlib" else find(name, *m))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run_one_shot_job(job, watcher=Display(visible=True))
    shown = capsys.readouterr().err
    said = f"{PICTURE_NAME} is left out: it needs matplotlib, which is not installed: pip install 'distprune[plot]'\n"
    assert shown.endswith(said)
    assert shown.count(PICTURE_NAME) == 1
    assert not (tmp_path / "out" / PICTURE_NAME).exists()
    assert (tmp_path / "out" / REPORT_NAME).is_file()


def test_a_picture_that_cannot_be_drawn_does_not_cost_the_model(
    job: OneShotJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    monkeypatch.setattr("distprune.jobs.picture.draw_blocks", broken)
    assert can_draw(pytest.fail)
    run_one_shot_job(job, watcher=Display(visible=True))
    assert f"{PICTURE_NAME} is left out, drawing it failed: RuntimeError: no fonts\n" in capsys.readouterr().err
    assert not (tmp_path / "out" / PICTURE_NAME).exists()
    assert (tmp_path / "out" / REPORT_NAME).is_file()
