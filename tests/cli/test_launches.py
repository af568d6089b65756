"""Real launchers, a few times: the same bytes under each, and an end for everyone when one rank is gone."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distprune.cli.launch import torch_variables
from tests.started import be_rank
from tests.worlds import CONTEXT

# One worker runs them, one after the other: they are several processes each.
pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("launcher")]

PYTHON = [sys.executable, "-m", "distprune"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "distprune"]
SECONDS = 120


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default", **more}


def mpiexec() -> str:
    pytest.importorskip("mpi4py", reason="needs the extra mpi")
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("needs mpiexec")
    return found


def finish(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, text_file: Path) -> bytes:
    """The weights one process writes, without a launcher."""
    output = tmp_path_factory.mktemp("alone") / "out"
    command = arguments(model_folder, output, text_file)
    process = CONTEXT.Process(target=be_rank, args=({}, command, str(output.parent / "log.txt")))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0, (output.parent / "log.txt").read_text()
    return (output / "model.safetensors").read_bytes()


def arguments(model: Path, output: Path, text: Path, num_tokens: int = 320) -> list[str]:
    line = f"--sparsity 0.3 --eval-tokens {num_tokens} --eval-length 16 --timeout 60"
    return ["prune", str(model), "--output", str(output), "--eval", str(text), *line.split()]


def check_output(output: Path, expected: bytes) -> None:
    assert (output / "model.safetensors").read_bytes() == expected
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_torchrun(tmp_path: Path, model_folder: Path, text_file: Path, expected: bytes) -> None:
    done = finish([*TORCHRUN, *arguments(model_folder, tmp_path / "out", text_file)])
    assert done.returncode == 0, done.stderr
    assert "by magnitude on 2 ranks (cpu)" in done.stdout
    assert done.stdout.count("perplexity") == 1  # the first rank speaks for all
    check_output(tmp_path / "out", expected)


def test_mpiexec(tmp_path: Path, model_folder: Path, text_file: Path, expected: bytes) -> None:
    done = finish([mpiexec(), "-n", "2", *PYTHON, *arguments(model_folder, tmp_path / "out", text_file)])
    assert done.returncode == 0, done.stderr
    assert "by magnitude on 2 ranks (cpu)" in done.stdout
    check_output(tmp_path / "out", expected)


def is_free(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) != 0


@pytest.mark.whole
def test_srun(tmp_path: Path, model_folder: Path, text_file: Path, expected: bytes) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": "0"}
    jobs = ({**step, "SLURM_JOB_ID": str(number)} for number in range(os.getpid(), os.getpid() + 100))
    job = next(job for job in jobs if is_free(torch_variables(job)["MASTER_PORT"]))
    line = arguments(model_folder, tmp_path / "out", text_file)
    processes = [
        CONTEXT.Process(target=be_rank, args=({**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}, line, ""))
        for rank in ("0", "1")
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0, 0]
    check_output(tmp_path / "out", expected)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seed", "9"], "error: ranks were called with different arguments: --seed: 0 on rank 0; 9 on rank 1"),
        (["--loud"], "rank 1: error: No such option: --loud"),
    ],
)
def test_mpiexec_ends_all_when_one_fails(
    tmp_path: Path, model_folder: Path, text_file: Path, more: list[str], said: str
) -> None:
    line = arguments(model_folder, tmp_path / "out", text_file)
    done = finish([mpiexec(), "-n", "1", *PYTHON, *line, ":", "-n", "1", *PYTHON, *line, *more])
    assert done.returncode != 0
    assert done.stderr.count(said) == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.whole
def test_torchrun_ends_all_and_nothing_is_left(tmp_path: Path, model_folder: Path, text_file: Path) -> None:
    psutil = pytest.importorskip("psutil")
    (tmp_path / "long.txt").write_text(text_file.read_text() * 100)
    folder = tmp_path / "outputs"
    line = arguments(model_folder, folder / "out", tmp_path / "long.txt", 250_000)
    started = subprocess.Popen([*TORCHRUN, *line], env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + SECONDS
        while not list(folder.glob(".out.unfinished")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        workers = psutil.Process(started.pid).children()
        next(worker for worker in workers if worker.environ().get("RANK") == "1").kill()
        started.communicate(timeout=SECONDS)
        assert started.returncode != 0
        assert psutil.wait_procs(workers, timeout=SECONDS)[1] == []
    finally:
        started.kill()
    assert list(folder.iterdir()) == []
