"""Tokens of experts go to their owners, wave by wave: the moments are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from distprune.calibration.moments import Moments
from distprune.calibration.order import learn_order
from distprune.calibration.statistics import InputStatistics
from distprune.calibration.targets import Targets
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from tests.architectures import tiny_model
from tests.calibration.test_statistics import walk_of_model
from tests.oneshot.alike import sharded
from tests.worlds import all_raise, drawing, run_threads

NUM_EXPERTS, WIDTH = 16, 16
SIZE = 8 * WIDTH**2 * 2  # bytes of the sums of one input with targets: each expert has two, of equal width


def mixture() -> Any:
    return tiny_model("mixtral", num_local_experts=NUM_EXPERTS, hidden_size=WIDTH, intermediate_size=WIDTH)


def heard(model: Any, comm: Communicator, before: Callable[[], object] = lambda: None) -> InputStatistics:
    """Return what the first block's layers are given; tokens of the dense stream go to other experts."""
    walk, linears = walk_of_model(model, comm), linear_layers(decoder_blocks(model)[0][1])
    for i, hidden in enumerate(walk.hidden):
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(comm.rank + comm.size * i))
        walk.dense.append(hidden + noise / 8)
    order = learn_order(comm, walk, 0, linears).at_once()
    targets = Targets(walk, order, linears)
    targets.run(comm, 0, linears)
    statistics = InputStatistics(comm, walk, linears, "products", targets)
    before()
    statistics.run(0)
    return statistics


@cache
def of_one() -> dict[tuple[str, ...], Moments]:
    _, wave = heard(mixture(), Alone()).reduce(1 << 40)
    return {m.names: m for m in wave}


@pytest.mark.parametrize("at_once", [1, 3, NUM_EXPERTS])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.sampled(5)
def test_the_same_in_any_waves(num_ranks: int, at_once: int) -> None:
    def on_rank(_: int) -> list[list[Moments]]:
        model = sharded(mixture()) if num_ranks > 1 else mixture()
        comm = communicator()
        return list(heard(model, comm).reduce(2 * at_once * SIZE))

    wanted = of_one()
    reached = [m for m in wanted.values() if m.num_tokens]
    assert len(reached) > 2
    assert any(m.shift is not None and m.shift.any() for m in reached)
    seen = set()
    for rank, (_, *waves) in enumerate(run_threads(num_ranks, on_rank)):
        assert len(waves) == -(-NUM_EXPERTS // num_ranks // at_once)
        for m in (m for wave in waves for m in wave):
            one = wanted[m.names]
            assert m.num_tokens == one.num_tokens
            assert m.owner == int(m.names[0].rpartition(".")[2]) * num_ranks // NUM_EXPERTS  # has the rows
            torch.testing.assert_close(m.squares, one.squares, rtol=1e-5, atol=1e-6)
            if m.owner != rank:
                assert m.products is m.shift is None
                continue
            seen.add(m.names)
            for name in ("products", "shift"):
                here, there = getattr(m, name), getattr(one, name)
                torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)
    assert seen == wanted.keys()


def with_nan(rank: int) -> None:
    with drawing(0):
        model = mixture()
    experts = model.model.layers[0].mlp.experts.gate_up_proj.data
    comm = communicator()
    list(heard(model, comm, lambda: experts.fill_(torch.nan if rank else 0.0)).reduce(SIZE))


def test_nan_is_raised_on_all() -> None:
    all_raise(2, with_nan, kind=ValueError, match="NaN or Inf in the inputs of 'mlp.experts.down_proj.")
