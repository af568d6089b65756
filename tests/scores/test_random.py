"""The hash: equal to plain integer arithmetic, independent of the layout, and uniform."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distprune.scores import LocalScores, Random
from distprune.selection import Order
from distprune.shards import Geometry, LocalShard, Ownership, local_shard
from tests.oracle import random_scores


def hashed(shard: LocalShard, seed: int, start: int, stop: int) -> torch.Tensor:
    return LocalScores(shard, Random(seed)).values(slice(start, stop))


def test_equals_integer_arithmetic() -> None:
    scores = LocalScores(local_shard("layer.weight", torch.ones(30, 40)), Random(5))
    wanted = random_scores("layer.weight", (30, 40), 5).flatten()
    assert torch.equal(scores.values(slice(0, 1200)).long(), wanted)
    assert torch.equal(scores.values(torch.tensor([7, 3])).long(), wanted[[7, 3]])
    assert torch.equal(Random(5).of_units("layer.weight", torch.arange(1200)).long(), wanted)


def test_seed_and_name_matter() -> None:
    def values(name: str, seed: int) -> torch.Tensor:
        return hashed(local_shard(name, torch.ones(1000)), seed, 0, 1000)

    assert torch.equal(values("a", 1), values("a", 1))
    assert not (values("a", 1) == values("a", 2)).any()
    assert not (values("a", 1) == values("b", 1)).any()


@pytest.mark.parametrize("seed", [0, 1, 2**62, -3])
def test_uniform(seed: int) -> None:
    """Chi-squared over 256 bins of high, and of low, bits: mean 255, deviation 22.6; and neighbours unlike."""
    values = hashed(local_shard("w", torch.ones(1 << 18)), seed, 0, 1 << 18).numpy()
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
        LocalShard("w", torch.ones(1, 100), Geometry(shape, (((row, row + 1),), columns)), Ownership())
        for row in range(3)
    ]
    rows = [hashed(shard, 0, 0, 100) for shard in shards]
    assert not (rows[0] == rows[1]).any()
    assert not (rows[1] == rows[2]).any()


def test_what_is_gone_comes_first() -> None:
    weight = torch.tensor([1.0, 0.0, -0.0, 2.0])
    order = Order("value", torch.int32)
    keys = LocalScores(local_shard("w", weight), Random(0), {}, weight).keys(order, slice(0, 4))
    assert (keys == order.gone).tolist() == [False, True, True, False]
    assert (LocalScores(local_shard("w", weight), Random(0)).keys(order, slice(0, 4)) >= 0).all()
