"""One contract for every kind of ranks: alone, threads, gloo processes, and MPI (see mpi_program.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distprune.collectives.agree import max_together, sum_together, swap_unknown
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, ProcessGroup, communicator, staging_device
from tests.collectives.checks import check_all
from tests.sampling import only_whole
from tests.worlds import ProcessPool, run_threads


def check_rank(_: int) -> None:
    check_all(communicator())


def check_on_part(rank: int) -> None:
    """A group that is not the world, whose rank 0 is another global rank."""
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        check_all(communicator(group))
    else:
        with pytest.raises(ValueError, match="not a member"):
            ProcessGroup(group)


def test_alone() -> None:
    assert isinstance(communicator(), Alone)
    check_all(communicator())


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_threads(world_size: int) -> None:
    run_threads(world_size, check_rank)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gloo(pool: ProcessPool, world_size: int) -> None:
    pool.run(world_size, check_rank)


def test_part_of_the_world(pool: ProcessPool) -> None:
    pool.run(3, check_on_part)


@pytest.mark.launcher
@pytest.mark.parametrize("num_ranks", [only_whole(1), 2, only_whole(3)])
@pytest.mark.whole
def test_mpi(mpiexec: Callable[..., subprocess.CompletedProcess[str]], num_ranks: int) -> None:
    done = mpiexec(num_ranks, sys.executable, "-m", "tests.collectives.mpi_program")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"ranks": num_ranks}


def test_what_is_no_group() -> None:
    with pytest.raises(TypeError, match="must be a torch"):
        communicator("world")  # type: ignore[arg-type]


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group first"):
        ProcessGroup()


def test_a_ready_communicator_is_taken_as_it_is() -> None:
    comm: Communicator = Alone()
    assert communicator(comm) is comm


def test_alone_reductions_leave_their_argument() -> None:
    values = torch.tensor([1, 2])
    reduced = Alone().sum(values)
    reduced += 1
    assert values.tolist() == [1, 2]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_who_stops_a_rank_is_not_asked_to_wait(stop: type[BaseException]) -> None:
    comm = Alone()

    def ends(*_: object) -> dict[int, torch.Tensor]:
        raise stop

    for call in (
        lambda: sum_together(comm, (1,), ends),
        lambda: max_together(comm, (1,), ends),
        lambda: swap_unknown(comm, ends),
    ):
        with pytest.raises(stop):
            call()
    assert comm.traffic.num_rounds == 0


def test_messages_are_staged_on_the_device_that_the_group_is_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: "cuda:nccl")
    group: Any = SimpleNamespace(bound_device_id=torch.device("cuda", 3))
    assert staging_device(group) == torch.device("cuda", 3)
