"""This process as one rank of torchrun, srun or mpiexec: from the launcher's variables to the end of the process.

A rank that fails ends with an error code: torchrun, ``srun --kill-on-bad-exit`` and mpiexec then end the others. Ranks
that were started by hand wait for the group's timeout.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from distprune.checkpoint.optional_packages import import_extra
from distprune.collectives.communicator import communicator

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
# Set by mpiexec of Open MPI, of MPICH and its kin, and of MVAPICH; never by srun.
_MPIEXEC = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
# Set by other launchers of MPI programs, and by srun where SLURM's default is --mpi=pmi2 or pmix.
_PMI = ("PMI_RANK", "PMIX_RANK")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_SLURM_PORTS = range(20000, 52000)
_GRACE = 5.0  # seconds from a signal to the end of a process that waits for another rank


def likely_rank(environment: Mapping[str, str]) -> int:
    """Return the rank that the launcher gave this process, 0 where it gave none."""
    text = next((environment[name] for name in _RANKS if name in environment), "0")
    return int(text) if text.isdecimal() else 0


def start_ranks(device: str, timeout_seconds: float) -> torch.device:
    """Start the process group that torch's variables call for, and return this rank's device. Every rank must call it.

    From then on SIGTERM unwinds the stack, so that what is half written is removed.

    Args:
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA where there is a GPU.
        timeout_seconds: how long a rank waits for the others before it gives up.

    Raises:
        ValueError: CUDA is asked for and not there, or a variable is missing.
        TimeoutError: the others have not come in time.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but there is no CUDA device")
    signal.signal(signal.SIGTERM, _unwind)
    size, local_size, local_rank = (
        int(os.environ.get(name, default))
        for name, default in (("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    if local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_size))  # until now: one for every core
    on_gpu = device != "cpu" and torch.cuda.is_available()
    chosen = torch.device("cuda", local_rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if size > 1:
        _end_on_signals()
        if on_gpu:
            torch.cuda.set_device(chosen)
        else:  # torch then asks for huge pages for tensors of 2 MiB and more
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        try:
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        except dist.DistError as error:
            raise TimeoutError(f"not all {size} ranks came within {timeout_seconds:g} seconds: {error}") from error
        except ValueError as error:  # torch says which variable
            raise ValueError(str(error)) from error
    return chosen


def torch_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables (``RANK``, ``WORLD_SIZE``, ...), unless they are there or the process is alone.

    torchrun goes first, since it may itself run under srun or mpiexec; then mpiexec, whose ranks inherit SLURM's
    variables of the one task that started them; then srun, which needs no MPI; then other launchers of MPI programs.

    Raises:
        ValueError: SLURM's list of nodes cannot be read, or mpi4py's MPI is not the launcher's.
        ImportError: started by an MPI launcher without mpi4py.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {}
    if any(name in environment for name in _MPIEXEC):
        return _ask_mpi(environment)
    # Of the step, not SLURM_NTASKS: a batch script has that of the whole job, and is one process.
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _of_slurm(environment)
    return _ask_mpi(environment) if any(name in environment for name in _PMI) else {}


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list such as ``gpu[003-004,7],login1`` or ``rack[1-2]node[3,5]``.

    Raises:
        ValueError: the list is empty or its brackets do not match.
    """
    match = re.match(r"((?:[^,\[\]]|\[\w[\w,-]*\])+)(?:,|$)", nodes.strip())
    if match is None:
        raise ValueError(f"cannot read the SLURM node list {nodes!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group(1))


def _of_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
    per_node = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))  # such as 8(x2),4
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": per_node.group() if per_node else "1",
        "MASTER_ADDR": first_host(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]),
        # As good as any port that all tasks of a step, and no two steps on a node, come to alone.
        "MASTER_PORT": str(_SLURM_PORTS[(job * 31 + step) % len(_SLURM_PORTS)]),
    }


def _ask_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    mpi = import_extra("mpi4py.MPI", "mpi")
    world, node = mpi.COMM_WORLD, mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    rank, size, local_rank, local_size = world.Get_rank(), world.Get_size(), node.Get_rank(), node.Get_size()
    node.Free()
    for name in _MPI_SIZES:  # an mpiexec of another MPI starts ranks that each believe to be alone
        if environment.get(name, str(size)) != str(size):
            raise ValueError(
                f"the launcher set {name}={environment[name]}, but mpi4py's MPI knows {size} rank(s): start the ranks "
                "with the mpiexec of the MPI that mpi4py was built with"
            )
    with socket.socket() as probe:
        probe.bind(("", 0))
        host = "127.0.0.1" if local_size == size else socket.gethostname()
        host, port = world.bcast((host, probe.getsockname()[1]), root=0)
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def _end_on_signals() -> None:
    """End the process some time after a signal, even if it waits for another rank, where no Python code runs."""
    heard, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.detach(), warn_on_full_buffer=False)
    threading.Thread(target=_end_after_grace, args=(heard,), daemon=True).start()


def _end_after_grace(heard: socket.socket) -> None:
    number = heard.recv(1)[0]
    time.sleep(_GRACE)
    os._exit(128 + number)


def _unwind(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def finish_ranks() -> None:
    """Wait for the other ranks at the end of the work. A signal no longer changes the exit code."""
    with suppress(Exception):  # whoever is lost now has done its work
        communicator().sum(torch.zeros(1, device="cpu", dtype=torch.int64))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)


def end(code: int) -> NoReturn:
    """End the process with ``code``, at once; under MPI all ranks, where ``code`` is not 0.

    Not by leaving the interpreter: threads of torch that it stops may abort the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        if code:
            mpi.COMM_WORLD.Abort(code)
        mpi.Finalize()
    os._exit(code)


def tell_torchrun(text: str) -> None:
    """Let torchrun repeat why this rank ends in its own report, the last thing it prints."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": {"message": text.strip(), "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError), open(path, "w") as file:
            json.dump(message, file)
