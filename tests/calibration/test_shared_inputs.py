"""Which layers share an input is the same on all ranks, whichever a token reached; owners take turns, by their work."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import nn

from distprune.calibration.shared_inputs import share_out, shared_inputs
from distprune.collectives.communicator import communicator
from distprune.models.linear_layers import LinearLayer
from tests.worlds import run_threads

LAYERS = ["q", "k", "up.0", "up.1", "gate.0", "gate.1"]
LINEARS = {name: LinearLayer(name, nn.Linear(2, 2), "weight", 2, 2) for name in LAYERS}
# What three ranks heard: of each layer the first that has its input; each counts 2 + rank tokens of each layer.
HEARD: dict[str, tuple[list[dict[str, str]], dict[tuple[str, ...], int]]] = {
    "alike": (
        [{"q": "q", "k": "q"}] * 3,
        {("q", "k"): 9, ("up.0",): 0, ("up.1",): 0, ("gate.0",): 0, ("gate.1",): 0},
    ),
    "experts of their own": (
        [{"q": "q", "up.0": "up.0", "gate.0": "up.0"}, {"q": "q", "gate.1": "gate.1", "up.1": "gate.1"}, {}],
        {("q",): 5, ("k",): 0, ("up.0", "gate.0"): 2, ("up.1", "gate.1"): 3},
    ),
    "some of those that share": (
        [{"q": "q"}, {"q": "q", "k": "q"}, {"k": "k"}],
        {},
    ),
}


def on_rank(rank: int, heard: list[dict[str, str]], fails: int) -> tuple[dict[tuple[str, ...], int], int, int]:
    comm = communicator()

    def own() -> tuple[Mapping[str, str], Mapping[str, int]]:
        if rank == fails:
            raise KeyError("boom")
        return heard[rank], dict.fromkeys(heard[rank], 2 + rank)

    inputs = shared_inputs(comm, LINEARS, (), own)
    found = {shared.names: shared.num_tokens for shared in inputs}
    return found, comm.traffic.num_rounds, comm.traffic.num_bytes


@pytest.mark.parametrize("case", HEARD)
def test_inputs_of_all_ranks(case: str) -> None:
    heard, wanted = HEARD[case]
    if wanted:
        # 24 bytes a layer, and whether a rank has failed, whatever the number of ranks.
        assert run_threads(3, on_rank, heard, -1) == [(wanted, 1, 24 * len(LAYERS) + 8)] * 3
    else:
        for error in run_threads(3, on_rank, heard, -1, catch=True):
            assert isinstance(error, NotImplementedError)
            assert "'k' has the input of other layers on one rank than on another" in str(error)


def test_what_one_rank_raises() -> None:
    heard, _ = HEARD["alike"]
    for error in run_threads(3, on_rank, heard, 1, catch=True):
        assert "boom" in str(error)


SMOLLM2 = [576**3, 576**3, 576**3, 1536**3]
MIXTURE = [64**3] * 34 + [128**3] * 32


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("sizes", [SMOLLM2, MIXTURE, [8] * 8, [1], []], ids=len)
def test_work_is_shared_out(sizes: list[int], num_ranks: int) -> None:
    loads = [0] * num_ranks
    for size, rank in zip(sizes, share_out(sizes, num_ranks), strict=True):
        loads[rank] += size
    assert max(loads) <= max([sum(sizes) / num_ranks + max(sizes, default=0), 0])
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_widest_input_has_a_rank_of_its_own() -> None:
    assert share_out(SMOLLM2, 2) == [1, 1, 1, 0]


def test_owners_have_the_rows_or_the_least_to_do() -> None:
    assert share_out([10, 20, 30, 40], 3, [2, None, None, 2]) == [2, 1, 0, 2]
