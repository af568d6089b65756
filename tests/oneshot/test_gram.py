"""W^T W of rows on several ranks is that of one, bit by bit."""

from __future__ import annotations

import pytest
import torch

from distprune.collectives.communicator import Alone, communicator
from distprune.oneshot.gram import sum_gram
from tests.worlds import run_threads


def weights() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(37, 24, generator=generator) * torch.logspace(-6, 2, 24)


def on_rank(rank: int, num_ranks: int, spoiled: float) -> torch.Tensor:
    rows = weights()[rank::num_ranks] if rank < 3 else torch.empty(0)
    if rank == 1 and spoiled:
        rows[0, 0] = spoiled
    return sum_gram(communicator(None), 37, 24, lambda: rows, rows.device)


def test_is_the_same_on_any_number_of_ranks() -> None:
    whole = weights()
    alone = sum_gram(Alone(), 37, 24, lambda: whole, whole.device)
    assert float((alone - whole.double().t() @ whole.double()).abs().max()) < 1e-5 * float(alone.max())
    for num_ranks in (2, 3):
        for found in run_threads(num_ranks, on_rank, num_ranks, 0.0):
            assert torch.equal(found, alone)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_on_every_rank(value: float) -> None:
    for error in run_threads(2, on_rank, 2, value, catch=True):
        assert isinstance(error, ValueError)
        assert "NaN or infinite" in str(error)
