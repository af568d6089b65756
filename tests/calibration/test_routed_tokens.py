"""Tokens of experts go to their owners, wave by wave: the moments are those of one process, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from distprune.calibration import routed_tokens
from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.data import spread
from distprune.calibration.moments import Moments
from distprune.calibration.order import learn_order
from distprune.calibration.owner_ranks import OwnerRank, SharedInput, find_routed_owners
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.statistics import InputStatistics
from distprune.calibration.targets import Targets
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import sharded
from tests.worlds import drawing, run_threads

NUM_EXPERTS, WIDTH = 16, 16
TOKENS = samples(5)
SIZE = 8 * WIDTH**2 * 2  # bytes of the sums of one input with targets: each expert has two, of equal width


def mixture() -> Any:
    return tiny_model("mixtral", num_local_experts=NUM_EXPERTS, hidden_size=WIDTH, intermediate_size=WIDTH)


def heard(
    model: Any, comm: Communicator, *, sums: bool = False, before: Callable[[], object] = lambda: None
) -> InputStatistics:
    """Return what the first block's layers are given; tokens of the dense stream go to other experts."""
    mine, linears = spread(TOKENS, comm.rank, comm.size), linear_layers(decoder_blocks(model)[0][1])
    walk = catch_inputs(model, mine.batches)
    walk.split()
    for i, hidden in enumerate(walk.dense):
        hidden += torch.randn(hidden.shape, generator=torch.Generator().manual_seed(comm.rank + comm.size * i)) / 8
    order = learn_order(comm, walk, 0, linears).at_once()
    targets = Targets(walk, order, linears)
    with targets.listening(linears, targets):
        walk.advance(0, comm, dense=True, begin=targets.begin_sample)
    group = SampleGroup(comm.rank, comm.size)
    statistics = InputStatistics(linears, "pairs", group, comm, targets, sums=sums)
    before()
    with statistics.listening(), walk.block(0) as run:
        for i in range(walk.num_batches):
            statistics.begin_sample(counts=i < mine.num_counted)
            run(i)
    return statistics


@cache
def of_one(sums: bool) -> dict[tuple[str, ...], Moments]:
    _, wave = heard(mixture(), Alone(), sums=sums).reduce(Alone(), expert_memory=1 << 40)
    return {m.names: m for m in wave}


@pytest.mark.parametrize("at_once", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.sampled(5)
def test_same_bits_in_any_waves(num_ranks: int, at_once: int, sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_tokens, "ARRIVING", 2000)

    def on_rank(_: int) -> list[list[Moments]]:
        model = sharded(mixture()) if num_ranks > 1 else mixture()
        comm = communicator()
        return list(heard(model, comm, sums=sums).reduce(comm, expert_memory=2 * at_once * SIZE))

    wanted = of_one(sums)
    reached = [m for m in wanted.values() if m.num_tokens]
    assert len(reached) > 2
    assert any(m.shift is not None and m.shift.any() for m in reached)
    seen = set()
    for rank, (_, *waves) in enumerate(run_threads(num_ranks, on_rank)):
        assert len(waves) == -(-NUM_EXPERTS // num_ranks // at_once)
        for m in (m for wave in waves for m in wave):
            one, names = wanted[m.names], ("values", "shift", "sums")
            assert m.num_tokens == one.num_tokens
            assert m.owner == OwnerRank(int(m.names[0].rpartition(".")[2]) * num_ranks // NUM_EXPERTS)  # has the rows
            if m.owner.rank != rank:
                assert not len(m.values)
                continue
            seen.add(m.names)
            for name in names:
                here, there = getattr(m, name), getattr(one, name)
                assert here is there is None or torch.equal(here, there), (m.names, name)
    assert seen == wanted.keys()


def test_tokens_of_other_ranks_alone_cross_the_network() -> None:
    """At most 64 MiB at a time, and none of what stays."""

    def on_rank(rank: int) -> tuple[int, int]:
        comm = communicator()
        kept = [[routed_tokens.RoutedTokens(torch.full((2, 4), float(rank)))] for _ in range(4)]
        taken: list[tuple[int, float]] = []

        def take(number: int, tokens: routed_tokens.RoutedTokens) -> None:
            taken.append((number, float(tokens.x.sum())))

        routed_tokens.send_tokens(comm, [0, 1, 1, 1], kept, take, torch.device("cpu"))()
        assert sorted(taken) == [(number, 8.0 * other) for number in range((1, 3)[rank]) for other in (0, 1)]
        assert not any(kept)
        return comm.traffic.num_rounds, comm.traffic.num_bytes

    (rounds, _), (same, most) = run_threads(2, on_rank)
    assert rounds == same == 4
    assert 3 * 32 < most < 3 * 32 + 250


def with_nan(rank: int) -> None:
    with drawing(0):
        model = mixture()
    experts = model.model.layers[0].mlp.experts.gate_up_proj.data
    comm = communicator()
    next(heard(model, comm, before=lambda: experts.fill_(torch.nan if rank else 0.0)).reduce(comm, expert_memory=SIZE))


def test_nan_in_the_last_wave_is_raised_on_all_before_the_first() -> None:
    for error in run_threads(2, with_nan, catch=True):
        assert isinstance(error, ValueError)
        assert str(error).startswith("NaN or Inf in the inputs of 'mlp.experts.down_proj.")


def test_owners_have_the_rows_or_the_least_to_do() -> None:
    inputs = [SharedInput((f"e{i}",), 4, 4, 10 * (i + 1)) for i in range(4)]
    assert [owner.rank for owner in find_routed_owners(inputs, [{2}, {0, 2}, set(), {2}], 3)] == [2, 0, 0, 2]
