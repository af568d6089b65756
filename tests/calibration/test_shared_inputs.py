"""Which layers share an input is the same on all ranks, or refused."""

from __future__ import annotations

from torch import nn

from distprune.calibration.shared_inputs import shared_inputs
from distprune.collectives.communicator import communicator
from distprune.models.linear_layers import LinearLayer
from tests.worlds import all_raise, run_threads

LINEARS = {name: LinearLayer(name, nn.Linear(2, 2), "weight", 2, 2) for name in ("q", "k", "up.0", "gate.0")}


def heard_on_rank(rank: int, *heard: dict[str, str]) -> dict[tuple[str, ...], int]:
    """``heard`` by rank: of each layer the first that has its input; rank r counts 2 + r tokens of each layer."""
    inputs = shared_inputs(communicator(), LINEARS, (), lambda: (heard[rank], dict.fromkeys(heard[rank], 2 + rank)))
    return {shared.names: shared.num_tokens for shared in inputs}


def test_of_experts_a_rank_may_hear_nothing() -> None:
    heard = [{"q": "q", "up.0": "up.0", "gate.0": "up.0"}, {"q": "q"}, {}]
    assert run_threads(3, heard_on_rank, *heard) == [{("q",): 5, ("k",): 0, ("up.0", "gate.0"): 2}] * 3


def test_some_of_those_that_share() -> None:
    heard = [{"q": "q"}, {"q": "q", "k": "q"}, {"k": "k"}]
    match = "'k' has the input of other layers on one rank than on another"
    all_raise(3, heard_on_rank, *heard, kind=NotImplementedError, match=match)
