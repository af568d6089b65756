"""What every process that runs tests has: its settings and its fixtures."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from distprune.kernels import available
from tests.cli.command import Command, command_of
from tests.hf_models import TEXT, make_model, make_tokenizer
from tests.worlds import NOBODYS_SEED, ProcessPool, process_pool

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)
if hasattr(os, "SCHED_BATCH"):  # ranks on few cores, and gloo's threads, interrupt each other less
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays, and need not be looked at


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _process_wide_settings() -> Iterator[None]:
    """Draw the same whichever tests ran before; fail the test that leaves another default dtype behind."""
    torch.manual_seed(NOBODYS_SEED)
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert left == torch.float32


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels for what lies on the CPU, in Triton's interpreter."""
    import_module("tests.kernels.interpreted")
    monkeypatch.setattr(available, "_DEVICES", ("cuda", "cpu"))


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    with process_pool(4) as workers:
        yield workers


@pytest.fixture(scope="session")
def split_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in several weight files, into which nobody writes."""
    return make_model(tmp_path_factory.mktemp("models") / "llama", max_shard_size="9KB")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of single characters, into which nobody writes."""
    folder = make_model(tmp_path_factory.mktemp("llama") / "model")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the console script within this process."""
    return command_of(monkeypatch, capsys)


@pytest.fixture(scope="session")
def mpiexec() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a command on so many MPI ranks."""
    beside = Path(sys.executable).with_name("mpiexec")
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        pytest.skip("there is no mpiexec; pip install mpich brings one")

    def run(num_ranks: int, *command: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, "-n", str(num_ranks), *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    return run
