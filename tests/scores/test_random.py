"""The hash: equal to plain integer arithmetic, independent of the layout, and uniform."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distprune.scores import Random
from distprune.shards import Geometry, LocalShard, local_shard
from tests.oracle import random_scores


def test_equals_integer_arithmetic() -> None:
    scores = Random(local_shard("layer.weight", torch.ones(30, 40)), seed=5)
    assert torch.equal(scores.values(0, 1200).long(), random_scores("layer.weight", (30, 40), 5).flatten())
    assert torch.equal(scores.values_at(torch.tensor([7, 3])), scores.values(0, 8)[[7, 3]])


def test_seed_and_name_matter() -> None:
    def values(name: str, seed: int) -> torch.Tensor:
        return Random(local_shard(name, torch.ones(1000)), seed).values(0, 1000)

    assert torch.equal(values("a", 1), values("a", 1))
    assert not (values("a", 1) == values("a", 2)).any()
    assert not (values("a", 1) == values("b", 1)).any()


@pytest.mark.parametrize("seed", [0, 1, 2**62, -3])
def test_uniform(seed: int) -> None:
    """Chi-squared over 256 bins of high, and of low, bits: mean 255, deviation 22.6; and neighbours unlike."""
    values = Random(local_shard("w", torch.ones(1 << 18)), seed).values(0, 1 << 18).numpy()
    assert values.min() >= 0
    for bins in (values >> 23, values & 255):
        expected = (1 << 18) / 256
        chi_squared = ((np.bincount(bins, minlength=256) - expected) ** 2 / expected).sum()
        assert 255 - 5 * 22.6 < chi_squared < 255 + 5 * 22.6
    correlation = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(correlation) < 5 / 512


def test_parameters_of_more_than_2_to_the_32_elements() -> None:
    """Elements 2**32 apart differ; only a few of them are made."""
    shape = (3, 1 << 32)
    columns = ((5, 105),)
    shards = [
        LocalShard("w", torch.ones(1, 100), Geometry(shape, (((row, row + 1),), columns)), True, 1) for row in range(3)
    ]
    rows = [Random(shard, 0).values(0, 100) for shard in shards]
    assert not (rows[0] == rows[1]).any()
    assert not (rows[1] == rows[2]).any()


def test_zeros_come_first_if_asked() -> None:
    shard = local_shard("w", torch.tensor([1.0, 0.0, -0.0, 2.0]))
    assert (Random(shard, 0, zeros_first=True).values(0, 4) == -1).tolist() == [False, True, True, False]
    assert (Random(shard, 0).values(0, 4) >= 0).all()
