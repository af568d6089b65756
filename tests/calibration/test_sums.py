"""Sums about the mean are those of two passes in float64, however far from 0 the mean is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from distprune.calibration.moments import Moments
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.statistics import InputStatistics
from distprune.collectives.communicator import communicator
from distprune.models.linear_layers import linear_layers
from tests.worlds import drawing, run_threads

NUM_SAMPLES, LENGTH, NUM_IN = 6, 40, 130


def inputs(mean: float) -> torch.Tensor:
    """Return samples (samples, length, in), features of which are correlated, and one is always the same."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(NUM_IN, NUM_IN, generator=generator) / float(NUM_IN) ** 0.5
    x: torch.Tensor = torch.randn(NUM_SAMPLES, LENGTH, NUM_IN, generator=generator) @ mixed
    x += torch.randn(NUM_SAMPLES, 1, NUM_IN, generator=generator) / 4 + mean  # each sample has a mean of its own
    x[..., 3] = mean + 0.1
    return x


def moments_of(x: torch.Tensor, sample_group: SampleGroup) -> Moments:
    with drawing(0):
        block = nn.Sequential(nn.Linear(NUM_IN, 2))
    statistics = InputStatistics(linear_layers(block), "pairs", sample_group, communicator(), sums=True)
    with statistics.listening(), torch.no_grad():
        for sample in x[sample_group.number :: sample_group.num_groups]:
            statistics.begin_sample()
            block(sample)
    ((moments,),) = statistics.reduce(communicator())
    return moments


@pytest.mark.parametrize("mean", [0.0, 300.0, 1000.0, -30000.0])
def test_about_the_mean(mean: float) -> None:
    x = inputs(mean)
    flat = x.flatten(0, 1).double()
    about = flat - flat.mean(dim=0)
    wanted = about.t() @ about
    one = moments_of(x, SampleGroup())
    assert one.centered is not None
    assert one.sums is not None
    assert float((one.centered - wanted).norm()) <= 1e-6 * float(wanted.norm())
    assert not one.centered[3].any()
    of_features = torch.stack([flat.sum(dim=0), flat.abs().sum(dim=0), about.square().sum(dim=0)], dim=1)
    torch.testing.assert_close(one.sums, of_features, rtol=1e-6, atol=0)
    torch.testing.assert_close(one.values.double(), flat.t() @ flat, rtol=1e-6, atol=1e-3)
    for num_ranks in (2, 3):
        for found in run_threads(num_ranks, lambda rank, n=num_ranks: moments_of(x, SampleGroup(rank, n))):
            if found.owner.spread or len(found.values):
                for name in ("values", "centered", "sums"):
                    assert torch.equal(getattr(found, name), getattr(one, name)), name
        for found in run_threads(num_ranks, lambda rank, n=num_ranks: moments_of(x, SampleGroup(rank=rank, size=n))):
            if found.owner.spread or len(found.values):  # shares of the features of the same samples
                assert found.centered is not None
                assert float((found.centered - wanted).norm()) <= 1e-6 * float(wanted.norm())
