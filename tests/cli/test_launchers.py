"""How the ranks were started is read from the environment alone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from distprune.cli import launchers, ranks
from distprune.cli.launchers import Start, check_size, detect, first_host, likely_rank
from distprune.cli.ranks import Launch, schedule_as_batch, use_huge_pages
from tests.sampling import only_whole

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
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
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}


def test_alone() -> None:
    assert detect({"PATH": "/bin"}) == Start("alone")


def test_torchrun() -> None:
    assert detect(TORCHRUN) == Start("torchrun", 5, 8, 1, 4, "node1", 29500)


def test_srun_reads_the_step_not_the_job() -> None:
    start = detect(SRUN)
    assert (start.launcher, start.rank, start.size) == ("slurm", 9, 12)
    assert (start.local_rank, start.local_size, start.host) == (1, 8, "gpu002")


def test_srun_port_is_that_of_all_ranks_and_of_no_other_step() -> None:
    port = detect(SRUN).port
    assert port == detect({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).port
    assert 1024 < port < 65536
    assert len({detect({**SRUN, "SLURM_STEP_ID": str(step)}).port for step in range(31)}) == 31
    assert detect({**SRUN, "SLURM_JOB_ID": "4712"}).port != port


def test_batch_script_is_one_process() -> None:
    # sbatch runs the script itself with the size of the whole job, and nobody to make up the number.
    batch = {name: SRUN[name] for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_NODELIST")}
    assert detect(batch) == Start("alone")


@pytest.mark.parametrize("variables", [HYDRA, OPEN_MPI, {"PMI_RANK": "0"}, {"PMIX_RANK": "0"}])
def test_mpi(variables: dict[str, str]) -> None:
    assert detect(variables) == Start("mpi")


@pytest.mark.parametrize("variables", [HYDRA, OPEN_MPI])
def test_mpiexec_inside_of_slurm(variables: dict[str, str]) -> None:
    assert detect({**SRUN, **variables}).launcher == "mpi"


def test_srun_with_pmi_needs_no_mpi() -> None:
    assert detect({**SRUN, "PMI_RANK": "9", "PMIX_RANK": "9"}).launcher == "slurm"


@pytest.mark.parametrize("variables", [HYDRA, SRUN])
def test_torchrun_inside_of_another_launcher(variables: dict[str, str]) -> None:
    assert detect({**variables, **TORCHRUN}).launcher == "torchrun"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": ""}, "did not set MASTER_ADDR"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http', which is no whole number"),
        ({"RANK": "8"}, "set rank 8 of 8"),
        ({"RANK": "-1"}, "set rank -1 of 8"),
    ],
)
def test_broken_variables(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        detect({**TORCHRUN, **change})


def test_missing_variable() -> None:
    with pytest.raises(ValueError, match="did not set SLURM_PROCID"):
        detect({name: value for name, value in SRUN.items() if name != "SLURM_PROCID"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[3-8]", "gpu3"),
        ("gpu[003-004,7],login1", "gpu003"),
        ("gpu[7,9-12]", "gpu7"),
        ("login1,gpu[1-2]", "login1"),
        ("a-b[09-10]-ib", "a-b09-ib"),
        ("rack[1-2]node[3,5]", "rack1node3"),
        ("node1.cluster.example,node2", "node1.cluster.example"),
        (" node4 ", "node4"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "  ", "gpu[", "gpu[1-2", "gpu]1", "gpu[]", ",node1", "gpu[[1]]"])
def test_node_list_that_is_none(nodes: str) -> None:
    with pytest.raises(ValueError, match="cannot read the SLURM node list"):
        first_host(nodes)


@pytest.mark.parametrize("name", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_mpiexec_of_another_mpi_is_told_apart(name: str) -> None:
    check_size({name: "4"}, 4)
    with pytest.raises(ValueError, match=f"{name}=4, but mpi4py's MPI knows 1 rank"):
        check_size({name: "4"}, 1)


def test_size_that_the_launcher_does_not_say() -> None:
    check_size({"PMIX_RANK": "0"}, 3)


@pytest.mark.parametrize(
    ("variables", "rank"), [({}, 0), (TORCHRUN, 5), (SRUN, 9), (HYDRA, 1), (OPEN_MPI, 1), ({"RANK": "x"}, 0)]
)
def test_likely_rank(variables: dict[str, str], rank: int) -> None:
    assert likely_rank(variables) == rank


@pytest.mark.parametrize(("resolved", "own"), [("10.1.2.3", "10.1.2.3"), (None, "box")])
def test_own_address(monkeypatch: pytest.MonkeyPatch, resolved: str | None, own: str) -> None:
    def resolve(_: str) -> str:
        if resolved is None:
            raise OSError("unknown host")
        return resolved

    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    assert launchers._own_address() == own


def test_own_address_is_not_the_loopback_that_debian_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert not launchers._own_address().startswith("127.")


@pytest.mark.parametrize(("local_size", "said", "threads"), [(1, None, 8), (4, None, 2), (16, None, 1), (4, "8", 8)])
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, local_size: int, said: str | None, threads: int
) -> None:
    set_to = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: set_to[-1])
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    ranks._share_cores(local_size)
    assert set_to[-1] == threads


def test_one_process_needs_no_process_group() -> None:
    launch = Launch()
    assert (launch.start("cpu", 10), launch.rank) == (torch.device("cpu"), 0)
    assert not torch.distributed.is_initialized()
    assert launch.leave(1)  # nobody else says why


def test_cuda_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        Launch().start("cuda", 10)


def test_sigterm_unwinds_the_stack_until_the_work_is_done() -> None:
    launch = Launch()
    launch.start("cpu", 10)
    with pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)
    launch.finish()
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has scheduling policies")
@pytest.mark.parametrize(("chosen", "after"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")])
def test_threads_are_scheduled_as_a_batch_unless_the_user_said_otherwise(chosen: str, after: str) -> None:
    found: list[int] = []

    def run() -> None:  # in a thread of its own: the policy is a thread's
        os.sched_setscheduler(0, getattr(os, chosen), os.sched_param(0))
        schedule_as_batch()
        started = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        started.start()
        started.join()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [getattr(os, after)]


@pytest.mark.parametrize("chosen", [None, only_whole("0")])
def test_large_tensors_of_ranks_are_in_huge_pages_unless_the_user_said_otherwise(chosen: str | None) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("huge pages are not for those who ask")
    environment = {**os.environ}
    environment.pop("THP_MEM_ALLOC_ENABLE", None)
    if chosen is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = chosen
    program = (
        "import torch, distprune.cli.main\n"
        "distprune.cli.ranks.use_huge_pages()\n"
        "taken = torch.ones(1 << 24)\n"
        "print(open('/proc/self/smaps_rollup').read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    (found,) = re.findall(r"AnonHugePages: *(\d+) kB", done.stdout)
    assert (int(found) >= 1 << 14) == (chosen is None)  # of 65536 kB: some may be in ordinary pages


def test_what_the_user_chose_of_huge_pages_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    use_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
