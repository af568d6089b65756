"""The communicator's contract and the library's promise over MPI; run by mpiexec."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from typing_extensions import override

import distprune
from distprune.collectives.communicator import Alone, communicator
from distprune.collectives.mpi import MpiRanks
from tests.collectives.checks import check_all
from tests.contract import own_cases
from tests.pattern_oracle import keep_in_pattern
from tests.sampling import all_pairs
from tests.test_contract import KINDS, SCOPES, SCORES, SEED, oracle, whole_model


def check_pruning(world: Any) -> None:
    """Rows spread by hand, as an MPI program would; some ranks hold none."""
    rank, size = world.Get_rank(), world.Get_size()
    for score, scope, (kind, sparsity), dtype in all_pairs(SCORES, SCOPES, KINDS, (torch.float32, torch.bfloat16)):
        model = whole_model(kind, dtype, [(7, 5), (2, 3), (4, 2, 3)])
        expected = oracle(model, score, scope, sparsity)
        shards = _rows(model, rank, size)
        distprune.prune_shards(shards, sparsity, score=score, scope=scope, seed=SEED, group=world)
        for shard, whole in zip(shards, expected.values(), strict=True):
            wanted = whole[slice(*shard.geometry.dim_runs[0][0])] if shard.local.numel() else whole[:0]
            assert torch.equal(shard.local, wanted), (rank, score, scope, kind, shard.name)


def _rows(model: dict[str, torch.Tensor], rank: int, size: int) -> list[distprune.LocalShard]:
    shards = []
    for name, whole in model.items():
        low, high = (whole.shape[0] * i // size for i in (rank, rank + 1))
        geometry = distprune.Geometry.rows(whole.shape, low, high)
        shards.append(distprune.LocalShard(name, whole[low:high].clone(), geometry, distprune.Ownership()))
    return shards


def check_own_score_and_pattern(world: Any) -> None:
    """Ranks that hold rows come to what one process comes to."""
    for case in own_cases():
        model = whole_model("ties", torch.float32, [(6, 12), (2, 4), (8, 20)])
        alone, spread = _rows(model, 0, 1), _rows(model, world.Get_rank(), world.Get_size())
        distprune.prune_shards(alone, group=Alone(), **case)
        distprune.prune_shards(spread, group=world, **case)
        for shard, whole in zip(spread, alone, strict=True):
            wanted = whole.local[slice(*shard.geometry.dim_runs[0][0])] if shard.local.numel() else whole.local[:0]
            assert torch.equal(shard.local, wanted), (case, shard.name)


def check_patterns(world: Any) -> None:
    """Columns spread by hand, unevenly: groups, rows and blocks are cut."""
    rank, size = world.Get_rank(), world.Get_size()
    for pattern in (distprune.NByM(2, 4), distprune.PerRow(0.4), distprune.Block(2, 0.5)):
        model = whole_model("ties", torch.float32, [(6, 12), (2, 4), (8, 20)])
        left = [whole != 0 for whole in model.values()]
        keep = keep_in_pattern(pattern, list(model), list(model.values()), left, zeros="first")
        shards = []
        for name, whole in model.items():
            low, high = (whole.shape[1] * i // size for i in (rank, rank + 1))
            columns = ((low, high),) if low < high else ()
            geometry = distprune.Geometry(tuple(whole.shape), (((0, whole.shape[0]),), columns))
            part = whole[:, low:high].clone()
            shards.append(distprune.LocalShard(name, part, geometry, distprune.Ownership()))
        distprune.prune_shards(shards, pattern=pattern, group=world)
        for shard, whole, kept in zip(shards, model.values(), keep, strict=True):
            (low, high), *_ = shard.geometry.dim_runs[1] or ((0, 0),)
            assert torch.equal(shard.local, whole.masked_fill(~kept, 0)[:, low:high]), (rank, pattern, shard.name)


class Counted:
    """Intracommunicators whose duplicates are counted, and which of them are there still."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.duplicates: list[Any] = []
        counted = self

        class Intracomm(MPI.Intracomm):
            @override
            def Dup(self, info: Any = None) -> Any:
                counted.duplicates.append(MPI.Intracomm.Dup(self, info))
                return counted.duplicates[-1]

        self.of = Intracomm

    def num_alive(self) -> int:
        from mpi4py import MPI

        return sum(duplicate != MPI.COMM_NULL for duplicate in self.duplicates)


def check_duplicates(world: Any) -> None:
    """One duplicate a communicator, whatever handle names it, gone when the communicator is."""
    from mpi4py import MPI

    counted = Counted()
    for color in (0, world.Get_rank()):  # all ranks, then every rank by itself
        for _ in range(2):
            comm = world.Split(color)
            ranks = [communicator(counted.of(comm)) for _ in range(5)]
            assert isinstance(ranks[0], MpiRanks)
            assert MPI.Comm.Compare(comm, ranks[0].comm) == MPI.CONGRUENT
            assert counted.num_alive() == 1
            assert [int(each.sum(torch.ones(1, dtype=torch.int64))) for each in ranks] == [comm.Get_size()] * 5
            copied = comm.Dup()  # does not take the duplicate along
            copied.Free()
            assert counted.num_alive() == 1
            comm.Free()
            assert counted.num_alive() == 0
    assert len(counted.duplicates) == 4


def main() -> None:
    from mpi4py import MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    try:
        check_all(communicator(world))
        check_duplicates(world)
        check_pruning(world)
        check_patterns(world)
        check_own_score_and_pattern(world)
    except BaseException:
        import traceback

        traceback.print_exc()
        world.Abort(1)
    if world.Get_rank() == 0:
        sys.stdout.write(json.dumps({"ranks": world.Get_size()}) + "\n")


if __name__ == "__main__":
    main()
