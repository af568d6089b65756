from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from distprune.jobs import OneShotJob
from tests.hf_models import TEXT, make_model, make_tokenizer
from tests.small_job import small_job


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of single characters."""
    folder = make_model(tmp_path_factory.mktemp("llama") / "model")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def job(model_folder: Path, text_file: Path, tmp_path: Path) -> OneShotJob:
    """A job over copies of the model and the text, which a test may spoil."""
    shutil.copytree(model_folder, tmp_path / "model")
    shutil.copyfile(text_file, tmp_path / "text.txt")
    job = small_job(tmp_path / "model", tmp_path / "text.txt", tmp_path / "outputs")
    return dataclasses.replace(job, samples=5, sequence_length=24)
