from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distprune.jobs import OneShotJob, PruneJob, run_prune_job
from tests.hf_models import make_model, make_tokenizer
from tests.jobs.jobs_of_a_kind import files, job_of, run_on_rank
from tests.small_job import small_job
from tests.worlds import ProcessPool


@pytest.fixture(scope="session")
def of_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of several files."""
    folder = make_model(tmp_path_factory.mktemp("split") / "model", max_shard_size="12KB")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def pruned(of_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of it is zero."""
    folder = tmp_path_factory.mktemp("to tune") / "model"
    run_prune_job(PruneJob(model=str(of_files), output=str(folder), sparsity=0.5))
    return folder


@pytest.fixture
def draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all else."""
    monkeypatch.setattr("distprune.jobs.run.can_draw", lambda _: False)


@pytest.fixture(scope="session")
def expected(pool: ProcessPool) -> Callable[..., dict[str, bytes]]:
    """Returns what a job writes on so many ranks over a model that nobody has spoilt, which is run once."""
    known: dict[tuple[type, int], dict[str, bytes]] = {}

    def of_job(job: Any, num_ranks: int = 1) -> dict[str, bytes]:
        key = (type(job), num_ranks)
        if key not in known:
            other = Path(job.output).parents[1] / "whole" / Path(job.output).name
            whole = dataclasses.replace(job, output=str(other))
            assert pool.run(num_ranks, run_on_rank, whole) == [""] * num_ranks
            known[key] = files(other)
        return known[key]

    return of_job


@pytest.fixture
def make(of_files: Path, pruned: Path, text_file: Path, tmp_path: Path) -> Callable[[str], Any]:
    """Makes the job of a kind, over a copy of its model, which a test may spoil."""

    def make(kind: str) -> Any:
        model = shutil.copytree(pruned if kind == "finetune" else of_files, tmp_path / "model")
        return job_of(kind, model, text_file, tmp_path)

    return make


@pytest.fixture
def job(model_folder: Path, text_file: Path, tmp_path: Path) -> OneShotJob:
    """A job over copies of the model and the text, which a test may spoil."""
    shutil.copytree(model_folder, tmp_path / "model")
    shutil.copyfile(text_file, tmp_path / "text.txt")
    job = small_job(tmp_path / "model", tmp_path / "text.txt", tmp_path / "outputs")
    return dataclasses.replace(job, samples=5, sequence_length=24)
