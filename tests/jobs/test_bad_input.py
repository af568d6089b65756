"""What a one-shot job is given that is wrong: an error on every rank, and nothing is written."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distprune.jobs import OneShotJob, PlanJob, run_one_shot_job, run_plan_job
from tests.jobs.jobs_of_a_kind import run_in_own_folder, run_on_rank
from tests.worlds import ProcessPool, run_threads


def text_of(text: str, job: OneShotJob) -> OneShotJob:
    Path(job.calibration).write_text(text)
    return job


def with_vocabulary_of_another(job: OneShotJob) -> OneShotJob:
    path = Path(job.model) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = {token: number + 60 for token, number in tokenizer["model"]["vocab"].items()}
    path.write_text(json.dumps(tokenizer))
    return job


def without_tokenizer(job: OneShotJob) -> OneShotJob:
    for path in Path(job.model).glob("tokenizer*"):
        path.unlink()
    return job


# What makes a job wrong, and what is said of it.
WRONG: dict[str, tuple[Callable[[OneShotJob], OneShotJob], tuple[str, ...]]] = {
    "no text": (lambda job: text_of("", job), ("holds 0 tokens; 5 samples of 24 tokens need 120: give more text",)),
    "another vocabulary": (
        with_vocabulary_of_another,
        ("is outside the model's vocabulary of 67", "is the tokenizer another model's?"),
    ),
    "no tokenizer": (without_tokenizer, ("holds no tokenizer that transformers can load",)),
}


@pytest.mark.parametrize("what", WRONG)
def test_it_is_refused(pool: ProcessPool, job: OneShotJob, what: str) -> None:
    change, messages = WRONG[what]
    for error in pool.run(2, run_on_rank, change(job)):
        assert error.startswith("ValueError: ")
        assert all(message in error for message in messages), error
    assert not list(Path(job.output).parent.glob("*"))


def test_ranks_that_see_different_text(pool: ProcessPool, tmp_path: Path, job: OneShotJob) -> None:
    text = Path(job.calibration).read_text()
    for rank, of_rank in enumerate((text, text.replace("union", "onion"))):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.txt").write_text(of_rank)
    for error in pool.run(2, run_in_own_folder, tmp_path, dataclasses.replace(job, calibration="text.txt")):
        assert error.startswith("ValueError: ranks were called with different arguments: calibration tokens: ")
    (tmp_path / "1" / "text.txt").unlink()
    for error in pool.run(2, run_in_own_folder, tmp_path, dataclasses.replace(job, calibration="text.txt")):
        assert error.startswith("FileNotFoundError: ")
    assert not list(Path(job.output).parent.glob("*"))


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"ranks": 8}, "--ranks: null on rank 0; 8 on rank 1"),
        ({"model": "elsewhere"}, "--model"),
        (None, 'called different functions: "run_plan_job" on rank 0; "run_one_shot_job" on rank 1'),
    ],
)
def test_ranks_that_plan_different_jobs(job: OneShotJob, change: dict[str, Any] | None, shown: str) -> None:
    plan = PlanJob(**vars(job))

    def on_rank(rank: int) -> object:
        if rank == 0:
            return run_plan_job(plan)
        return run_one_shot_job(job) if change is None else run_plan_job(dataclasses.replace(plan, **change))

    for error in run_threads(2, on_rank, catch=True):
        assert type(error) is ValueError
        assert shown in str(error)
    assert not list(Path(job.output).parent.glob("*"))


def test_activations_that_are_no_numbers(pool: ProcessPool, job: OneShotJob) -> None:
    before = Path(shutil.copytree(job.model, f"{job.model} before"))
    path = Path(job.model) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.post_attention_layernorm.weight"][3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    for error in pool.run(2, run_on_rank, job):
        assert error.startswith("ValueError: block 'model.layers.1': NaN or Inf in the inputs of 'mlp.gate_proj'")
    assert os.listdir(Path(job.output).parent) == []  # the first block was written
    run_one_shot_job(dataclasses.replace(job, model=str(before)))  # so the mended job starts
