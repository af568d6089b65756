"""The hash: equal to plain integer arithmetic, independent of the layout, and uniform."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from distprune.scores.base import LocalScores
from distprune.scores.random import Random
from distprune.shards.geometry import Geometry
from distprune.shards.layouts import local_shard
from distprune.shards.local_shard import LocalShard, Ownership
from tests.device_path import as_on_a_device
from tests.oracle import random_scores, random_scores_at


def hashed(shard: LocalShard, seed: int, start: int, stop: int) -> torch.Tensor:
    return LocalScores(shard, Random(seed)).values(slice(start, stop))


def test_equals_integer_arithmetic() -> None:
    scores = LocalScores(local_shard("layer.weight", torch.ones(30, 40)), Random(5))
    wanted = random_scores("layer.weight", (30, 40), 5).flatten()
    assert torch.equal(scores.values(slice(0, 1200)).long(), wanted)
    assert torch.equal(scores.values(torch.tensor([7, 3])).long(), wanted[[7, 3]])
    assert torch.equal(Random(5).of_units("layer.weight", torch.arange(1200)).long(), wanted)


@pytest.mark.parametrize("there", [False, True], ids=["host", "device"])
def test_any_part_has_its_own(there: bool) -> None:
    """In rows that begin and end anywhere."""
    start, num = (1 << 36) - 9001, 10002
    run = LocalShard("w", torch.ones(num), Geometry((1 << 37,), (((start, start + num),),)), Ownership())
    runs = ((4000, 4100), (9000, 9001))
    columns = LocalShard("v", torch.ones(3, 101), Geometry((3, 1 << 14), (((0, 3),), runs)), Ownership())
    flat = [start + i for i in range(num)], [row << 14 | i for row in range(3) for each in runs for i in range(*each)]
    wanted = [random_scores_at(name, places, 5) for name, places in zip("wv", flat, strict=True)]
    with as_on_a_device() if there else contextlib.nullcontext():
        for shard, of in zip((run, columns), wanted, strict=True):
            for at in (slice(0, len(of)), slice(0, 0), slice(1, 200)):
                assert torch.equal(LocalScores(shard, Random(5)).values(at).long(), of[at])


@pytest.mark.parametrize("bit", [0, 3, 15, 30])
def test_neither_rows_nor_columns_agree(bit: int) -> None:
    """The squares of the correlations of 4096 elements of 1024 rows, or the reverse, average as those of fair coins.

    Nearly so of the low bits, which decide between a few elements alone.
    """
    values = hashed(local_shard("w", torch.ones(1024, 4096)), 3, 0, 1024 * 4096).view(1024, 4096)
    signs, num_pairs = (values >> bit & 1).float() * 2 - 1, 1024 * 1023 / 2
    for each in (signs, signs[:, :1024].T):
        squares = (each @ each.T).square().triu(1).sum() / each.shape[1]
        assert abs(float(squares) / num_pairs - 1) < (0.1 if bit < 15 else 5 * (2 / num_pairs) ** 0.5)


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
