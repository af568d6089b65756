"""The card beside a pruned model says what was done and keeps what the model's own card says; the picture beside it."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants

from distprune import Unstructured
from distprune.cli.show import Display
from distprune.jobs import Evaluation, OneShotJob, PruneJob, run_one_shot_job, run_prune_job
from distprune.jobs.model_card import model_card
from distprune.jobs.options import REPORT_NAME
from distprune.jobs.picture import PICTURE_NAME, can_draw, picture
from distprune.jobs.report import OF_A_RUN, PrunedBlocks, Trained, rows
from tests.cli.test_main import asked
from tests.small_job import block_entry

OWN = "---\nlicense: apache-2.0\nbase_model: org/dense\ntags:\n- llama\n---\n# A llama\n\nIt grazes.\n"


def block_of(language: str, text: str) -> str:
    """Return the first block of code in a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return str(found)


def test_a_job_in_place(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    run_prune_job(PruneJob(model=str(model_folder), output=str(output), sparsity=0.5, dtype=torch.bfloat16))
    card = ModelCard.load(output / "README.md")
    assert card.data.base_model is None  # a directory is no id of the hub
    assert card.data.tags == ["distprune", "pruned", "sparse"]
    assert "| sparsity | 50.0 % of " in card.text
    assert "| pattern | Unstructured(sparsity=0.5, scope='global') |" in card.text
    assert "| calibration | none: weights are chosen by their values alone |" in card.text
    assert block_of("bash", card.text) == (
        "distprune prune model --dtype bfloat16 --sparsity 0.5 --method magnitude --output out\n"
    )
    assert "perplexity" not in card.text
    monkeypatch.chdir(tmp_path)
    loaded: dict[str, Any] = {}
    exec(block_of("python", card.text), loaded)
    assert loaded["model"].dtype == torch.bfloat16
    assert loaded["tokenizer"]("ab")["input_ids"]
    run_prune_job(PruneJob(model=str(output), output=str(tmp_path / "again"), pattern=Unstructured(0.6)))
    again = ModelCard.load(tmp_path / "again" / "README.md")
    assert "```bash" not in again.text.partition("What follows")[0]  # a pattern from Python is no option
    assert "# model, pruned" in again.text


def test_a_one_shot_job(job: OneShotJob) -> None:
    (Path(job.model) / "README.md").write_text(OWN)
    report = run_one_shot_job(job)
    card: Any = ModelCard((Path(job.output) / "README.md").read_text())
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == "org/dense"  # as the card before says
    assert card.data.tags == ["distprune", "llama", "pruned", "sparse"]
    assert "| calibration | 5 windows of 24 tokens of text.txt |" in card.text
    for what, how_much in rows(report.to_dict()):
        assert (f"| {what} | {how_much} |" in card.text) == (what not in OF_A_RUN)
    assert "| method | sparsegpt |" in card.text
    by_wanda = report.to_dict()
    by_wanda["pruning"] = {**by_wanda["pruning"], "method": "wanda"}
    assert dict(rows(by_wanda))["pattern"] == "Unstructured(sparsity=0.5, scope='tensor'), each row by itself"
    assert card.text.rstrip().endswith("# A llama\n\nIt grazes.")


def test_a_model_of_the_hub(
    model_folder: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "cache" / "models--org--name"
    shutil.copytree(model_folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    files = (str(text_file), str(shutil.copyfile(text_file, tmp_path / "held_out.txt")))
    output = tmp_path / "out"
    report = run_prune_job(
        PruneJob(model="org/name@v1", output=str(output), sparsity=0.5, evaluate_on=files, evaluation_length=16)
    )
    card: Any = ModelCard.load(output / "README.md")
    assert card.data.base_model == "org/name"
    assert f"distprune prune org/name@{commit} " in card.text
    assert card.text.rstrip().endswith("--output out\n```")
    for name in ("text.txt", "held_out.txt"):
        assert f"| perplexity on {name}, in windows of 16 tokens | " in card.text
    report = dataclasses.replace(
        report,
        job=dataclasses.replace(report.job, tasks=("/home/own.yaml", "arc")),
        before=Evaluation(tasks={"arc": {"acc": 0.5}}),
        after=Evaluation(tasks={"arc": {"acc": 0.25}}),
    )
    assert "| acc on arc | 0.5000 -> 0.2500 |" in model_card(report).decode()


@pytest.mark.parametrize("more", [{"calibration": "self", "own_words": None}, {"method": "magnitude"}])
def test_the_command_is_the_job(job: OneShotJob, more: dict[str, Any]) -> None:
    """Whatever is left out because it is the default."""
    done = dataclasses.replace(job, pattern="2:4", overwrite=True, **more)
    run_one_shot_job(done)
    card: Any = ModelCard.load(Path(job.output) / "README.md")
    words = block_of("bash", card.text).removeprefix("distprune ")
    names: dict[str, Any] = {name: Path(getattr(done, name)).name for name in ("model", "output", "calibration")}
    assert asked(words) == dataclasses.replace(done, overwrite=False, **names)
    wrote = "that the model wrote; no text" if done.calibration == "self" else "of text.txt"
    assert f"| calibration | 5 windows of 24 tokens {wrote} |" in card.text


def test_a_model_in_the_current_directory(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_folder)
    report = run_prune_job(PruneJob(model=".", output=str(tmp_path / "out"), sparsity=0.5))
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"distprune prune {model_folder.name} " in card
    assert "base_model" not in card
    assert str(report).startswith(f"{model_folder.name}, pruned by magnitude")


def test_a_damaged_card_does_not_stop_a_job(job: OneShotJob) -> None:
    damaged = "---\nlicense: [\n---\n"
    (Path(job.model) / "README.md").write_text(damaged)
    run_one_shot_job(job)
    assert (Path(job.output) / "README.md").read_text() == damaged
    assert (Path(job.output) / "report.json").is_file()


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
