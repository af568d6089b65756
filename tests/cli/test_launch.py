"""Launchers' variables become torch's; cores and signals."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from distprune.cli import launch
from distprune.cli.launch import first_host, likely_rank, start_ranks, torch_variables

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[001-004]",
    "SLURM_STEP_NODELIST": "gpu[002,004]",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
}
BATCH = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NODELIST")}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}


def test_srun_reads_the_step_not_the_job() -> None:
    variables = torch_variables(SRUN)
    port = int(variables.pop("MASTER_PORT"))
    assert list(variables.values()) == ["9", "12", "1", "8", "gpu002"]
    others = [torch_variables({**SRUN, "SLURM_STEP_ID": str(step)})["MASTER_PORT"] for step in range(31)]
    assert 1024 < port < 65536
    assert len(set(others)) == 31
    assert torch_variables({**SRUN, "SLURM_PROCID": "0"})["MASTER_PORT"] == str(port)


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "none"),
        (BATCH, "none"),  # sbatch runs the script itself with the size of the whole job
        (HYDRA, "mpi"),
        (OPEN_MPI, "mpi"),
        ({"PMIX_RANK": "0"}, "mpi"),
        ({**SRUN, **HYDRA}, "mpi"),
        ({**SRUN, "PMI_RANK": "9", "PMIX_RANK": "9"}, "slurm"),
        ({**HYDRA, **TORCHRUN}, "none"),
        ({**SRUN, **TORCHRUN}, "none"),
    ],
)
def test_which_launcher_counts(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], launcher: str) -> None:
    monkeypatch.setattr(launch, "_ask_mpi", lambda _: {"RANK": "of mpi"})
    found = {None: "none", "of mpi": "mpi", "9": "slurm"}[torch_variables(variables).get("RANK")]
    assert found == launcher


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1,node2", "node1"),
        ("gpu[003-004,7],login1", "gpu003"),
        ("a-b[09-10]-ib", "a-b09-ib"),
        ("rack[1-2]node[3,5]", "rack1node3"),
        (" node4.cluster.example ", "node4.cluster.example"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "gpu[", "gpu[1-2", "gpu]1", "gpu[]", ",node1", "gpu[[1]]"])
def test_node_list_that_is_none(nodes: str) -> None:
    with pytest.raises(ValueError, match="cannot read the SLURM node list"):
        first_host(nodes)


def test_mpiexec_of_another_mpi_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1, Free=lambda: None)
    alone.Split_type, alone.bcast = lambda _: alone, lambda value, **_: value
    monkeypatch.setattr(launch, "import_extra", lambda *_: SimpleNamespace(COMM_WORLD=alone, COMM_TYPE_SHARED=1))
    assert torch_variables({"PMIX_RANK": "0", "PMI_SIZE": "1"})["MASTER_ADDR"] == "127.0.0.1"
    with pytest.raises(ValueError, match="PMI_SIZE=4, but mpi4py's MPI knows 1 rank"):
        torch_variables({**HYDRA, "PMI_SIZE": "4"})


def test_likely_rank() -> None:
    cases = [({}, 0), (TORCHRUN, 5), (SRUN, 9), (HYDRA, 1), (OPEN_MPI, 1), ({"RANK": "x"}, 0)]
    assert [likely_rank(variables) for variables, _ in cases] == [rank for _, rank in cases]


@pytest.mark.parametrize(("local_size", "said", "threads"), [(1, None, 8), (4, None, 2), (16, None, 1), (4, "8", 8)])
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, local_size: int, said: str | None, threads: int
) -> None:
    set_to = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: set_to[-1])
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert start_ranks("cpu", 10) == torch.device("cpu")
    assert set_to[-1] == threads


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        start_ranks("cuda", 10)


def test_sigterm_unwinds_the_stack_until_the_work_is_done() -> None:
    start_ranks("cpu", 10)
    with pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)
    launch.finish_ranks()
    os.kill(os.getpid(), signal.SIGTERM)
