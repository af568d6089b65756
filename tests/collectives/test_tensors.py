"""Tensors as collectives hand them over: rows from where they are held, parts from rank to rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distprune.collectives.communicator import communicator
from distprune.collectives.tensors import lookup_rows, whole_tensor
from tests.worlds import run_threads


def lookup(rank: int, num_rows: int, dtype: torch.dtype) -> None:
    comm, group = communicator(), torch.distributed.group.WORLD
    assert group is not None
    matrix = torch.arange(num_rows * 3).view(num_rows, 3).to(dtype)
    step = -(-num_rows // 3)
    local = matrix[rank * step : (rank + 1) * step]
    for indices in ([], [0], list(range(num_rows)), list(range(0, num_rows, 2 + rank)), [num_rows - 1] * (rank < 2)):
        before = comm.traffic.copy()
        found = lookup_rows(comm, group, local, num_rows, torch.tensor(indices, dtype=torch.int64))
        assert torch.equal(found, matrix[indices])
        assert found.dtype == dtype
        assert (comm.traffic - before).num_rounds == 3
    wrong = [0, num_rows] if rank == 1 else []
    with pytest.raises(IndexError, match=f"of a matrix of {num_rows} rows" if wrong else "rank 1 of 3 asked for rows"):
        lookup_rows(comm, group, local, num_rows, torch.tensor(wrong, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 7, 9])
def test_rows_are_looked_up_where_they_are(num_rows: int, dtype: torch.dtype) -> None:
    run_threads(3, lookup, num_rows, dtype)


def test_a_whole_tensor_is_counted_where_it_travels() -> None:
    values = torch.arange(6.0)

    def on_rank(_: int) -> None:
        comm, mesh = communicator(), init_device_mesh("cpu", (2,))
        for placement, num_bytes in ((Shard(0), 24), (Replicate(), 0)):
            before = comm.traffic.copy()
            assert torch.equal(whole_tensor(comm, distribute_tensor(values, mesh, [placement])), values)
            assert (comm.traffic - before).num_bytes == num_bytes

    run_threads(2, on_rank)
