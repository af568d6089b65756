"""The card beside a pruned model says what was done, and keeps what the model's own card says."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants

from distprune import Unstructured
from distprune.jobs import Evaluation, OneShotJob, PruneJob, run_one_shot_job, run_prune_job
from distprune.jobs.model_card import model_card
from distprune.jobs.report import OF_A_RUN, rows
from tests.cli.test_main import asked

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
