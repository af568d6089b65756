"""Which layers share an input is the same on all ranks, whichever a token reached; owners take turns."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import nn

from distprune.calibration.shared_inputs import shared_inputs
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
    assert [shared.owner for shared in inputs] == [i % 3 for i in range(len(inputs))]
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
