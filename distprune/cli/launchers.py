"""How this process was started: by torchrun, srun, mpirun, or alone; read from the environment."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from distprune.checkpoint.optional_packages import import_extra

Launcher = Literal["torchrun", "slurm", "mpi", "alone"]

# Set for every rank by the mpiexec of Open MPI, of MPICH and its kin (hydra), and of MVAPICH; never by srun.
_MPIEXEC_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_SIZE")
# Set by other launchers of MPI programs, and by srun where SLURM's default is --mpi=pmi2 or pmix.
_PMI_VARIABLES = ("PMI_RANK", "PMIX_RANK")
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_SLURM_PORTS = range(20000, 52000)


@dataclass(frozen=True)
class Start:
    """How this process was started, and what the launcher says of it (0 and 1 where it says nothing).

    Raises:
        ValueError: there is no such rank.
    """

    launcher: Launcher
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = ""
    port: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"the launcher set rank {self.rank} of {self.size}")


def detect(environment: Mapping[str, str]) -> Start:
    """Return how the process was started, from its environment alone.

    torchrun goes first, since it may itself run under srun or mpiexec; then mpiexec, whose ranks inherit
    SLURM's variables of the one task that started them; then srun, which needs no MPI; then other
    launchers of MPI programs.

    Raises:
        ValueError: the launcher's variables are there in part, or make no sense.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Start(
            "torchrun",
            rank=_int(environment, "RANK"),
            size=_int(environment, "WORLD_SIZE"),
            local_rank=_int(environment, "LOCAL_RANK", 0),
            local_size=_int(environment, "LOCAL_WORLD_SIZE", 1),
            host=_needed(environment, "MASTER_ADDR"),
            port=_int(environment, "MASTER_PORT"),
        )
    if any(name in environment for name in _MPIEXEC_VARIABLES):
        return Start("mpi")  # the rest is read from MPI itself
    # Of the step, not SLURM_NTASKS: a batch script has that of the whole job, and is one process.
    if _int(environment, "SLURM_STEP_NUM_TASKS", 1) > 1:
        nodes = environment.get("SLURM_STEP_NODELIST") or _needed(environment, "SLURM_JOB_NODELIST")
        job, step = _int(environment, "SLURM_JOB_ID"), _int(environment, "SLURM_STEP_ID", 0)
        # As good a choice as any that all tasks of a step, and no two steps on a node, come to alone.
        port = _SLURM_PORTS[(job * 31 + step) % len(_SLURM_PORTS)]
        per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")  # such as 8(x2),4
        leading_number = re.match(r"\d+", per_node)
        return Start(
            "slurm",
            rank=_int(environment, "SLURM_PROCID"),
            size=_int(environment, "SLURM_STEP_NUM_TASKS"),
            local_rank=_int(environment, "SLURM_LOCALID", 0),
            local_size=int(leading_number.group()) if leading_number else 1,
            host=first_host(nodes),
            port=port,
        )
    if any(name in environment for name in _PMI_VARIABLES):
        return Start("mpi")
    return Start("alone")


def likely_rank(environment: Mapping[str, str]) -> int:
    """Return the rank the launcher gave this process, 0 where it gave none: to know before the ranks have met."""
    said = next((environment[name] for name in _RANKS if name in environment), "0")
    return int(said) if said.isdecimal() else 0


def check_size(environment: Mapping[str, str], size: int) -> None:
    """Raise unless MPI knows as many ranks as the launcher says it started.

    An ``mpiexec`` of another MPI than mpi4py's starts ranks that each believe to be alone.

    Raises:
        ValueError: the numbers differ.
    """
    for name in _MPI_SIZES:
        if _int(environment, name, size) != size:
            raise ValueError(
                f"the launcher set {name}={environment[name]}, but mpi4py's MPI knows {size} rank(s): start the ranks "
                "with the mpiexec of the MPI that mpi4py was built with"
            )


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list such as ``gpu[003-004,7],login1`` or ``rack[1-2]node[3,5]``.

    Raises:
        ValueError: the list is empty or its brackets do not match.
    """
    match = re.match(r"((?:[^,\[\]]|\[\w[\w,-]*\])+)(?:,|$)", nodes.strip())
    if match is None:
        raise ValueError(f"cannot read the SLURM node list {nodes!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match.group(1))


def ask_mpi() -> Start:
    """Return rank, size and a meeting point, from MPI itself; every rank of the MPI world must call it."""
    mpi = import_extra("mpi4py.MPI", "mpi")
    world = mpi.COMM_WORLD
    check_size(os.environ, world.Get_size())
    node = world.Split_type(mpi.COMM_TYPE_SHARED)
    local_rank, local_size = node.Get_rank(), node.Get_size()
    node.Free()
    host = port = None
    if world.Get_rank() == 0:
        host = "127.0.0.1" if local_size == world.Get_size() else _own_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
    host, port = world.bcast((host, port), root=0)
    return Start("mpi", world.Get_rank(), world.Get_size(), local_rank, local_size, str(host), int(port or 0))


def _own_address() -> str:
    """Return an address of this host that other hosts reach."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        if not address.startswith("127."):
            return address
        # Debian calls itself 127.0.1.1. Connecting a datagram socket sends nothing, and tells which address leads out.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return name  # the other hosts may know it


def _needed(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ValueError(f"the launcher did not set {name}")
    return environment[name]


def _int(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = _needed(environment, name) if default is None else environment.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the launcher set {name}={text!r}, which is no whole number") from None
