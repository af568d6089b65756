"""Selection by kernels equals a stable sort: scores x dtypes x layouts x ties, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import interpreted  # noqa: F401  # first

from distprune.kernels.lowest import Keys, Mark  # isort: skip
from distprune.collectives.communicator import Alone  # isort: skip
from distprune.kernels.table import Piece, ScoreName, pieces_of  # isort: skip
from distprune.shards.geometry import Geometry  # isort: skip
from tests.kernels.cases import DTYPES, awkward, bits, hashed, keys_for, lowest, zeroed, prune_pieces  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # inf * 0, in numpy

SCORES: tuple[ScoreName, ...] = ("magnitude", "gradient", "taylor", "random", "keys")


def small(rng: np.random.Generator) -> dict[str, Any]:
    """Few samples and few bits: ranges miss, and passes are many."""
    samples, block = int(rng.choice([2, 16, 64, 1024])), int(rng.choice([128, 256]))
    return {"bits": int(rng.integers(3, 9)), "num_samples": samples, "block": block}


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.sampled(30)
def test_the_lowest_go(score: ScoreName, seed: int) -> None:
    rng = np.random.default_rng([SCORES.index(score), seed])
    num = int(rng.integers(1, 5))
    numels = [int(rng.choice([0, 1, 7, 16, 48, 200, 256, 511, 700])) for _ in range(num)] + [5]
    num, dtype, shift = len(numels), DTYPES[rng.integers(3)], int(rng.random() < 0.3)  # 1: nothing is aligned
    dtypes = [DTYPES[rng.integers(3)] if score == "magnitude" and seed % 3 == 0 else dtype for _ in numels]
    tensors = [awkward(rng, n + shift, t)[shift:] for n, t in zip(numels, dtypes, strict=True)]
    marks: tuple[Mark, ...] = ("zeros", "unmarked", "masked", "left")
    keys = keys_for(score, dtypes, marks[seed % 4])
    given = [torch.from_numpy(rng.integers(0, 2, n) == 1) for n in numels]
    if score == "keys":
        tensors = [torch.from_numpy(rng.integers(-(1 << 31) + 1, 1 << 30, n) >> rng.integers(30)).int() for n in numels]
        keys = Keys("keys", -(1 << 31), (1 << 30) - 1)
    grads = [awkward(rng, n, torch.float32).nan_to_num(1.0, 1.0, -1.0) for n in numels]
    competitions = [*range(num)] if rng.random() < 0.4 else [0] * num
    positions = np.bincount(competitions, numels).astype(int).tolist()
    k = [int(rng.choice([0, n, n // 2, rng.integers(n + 1)])) for n in positions]
    seeds = [(int(a), int(b)) for a, b in rng.integers(-(1 << 31), 1 << 31, (num, 2))]
    scores: Callable[[int], torch.Tensor] = {
        "magnitude": lambda i: tensors[i].double().abs(),
        "gradient": lambda i: grads[i].abs(),
        "taylor": lambda i: (tensors[i].float() * grads[i]).abs(),
        "random": lambda i: hashed(seeds[i], np.arange(numels[i]) + shift),
        "keys": lambda i: tensors[i].double() + 2.0**32,
    }[score]
    flat = torch.cat([scores(i).double() for i in range(num)])
    gone = torch.cat([(t == 0) & (keys.marked == "zeros" and score != "keys") for t in tensors])
    if keys.marked in ("masked", "left"):
        mask = torch.cat(given)
        gone = ~mask if keys.marked == "masked" else torch.zeros_like(mask)
        flat = (
            torch.where(gone, 0.0, flat)
            if keys.marked == "masked"
            else torch.where(mask, 2.0**130, flat.clamp(max=2.0**129))
        )
    goes = torch.split(lowest(flat.nan_to_num(0.0, torch.inf), gone, np.repeat(competitions, numels), k), numels)
    writes_mask = score == "keys" or rng.random() < 0.3
    masks = [torch.ones(n, dtype=torch.bool) for n in numels]
    before, passed, pieces = [t.clone() for t in tensors], [0] * num, []
    for i, (t, c) in enumerate(zip(tensors, competitions, strict=True)):
        other = grads[i] if score in ("gradient", "taylor") else None
        pieces.append(
            Piece(t, i, c, passed[c] - shift, shift, other=other, out=masks[i], mask=given[i], seeds=seeds[i])
        )
        passed[c] += numels[i]
    totals, found = prune_pieces(Alone(), pieces, k, positions, keys, writes_mask=writes_mask, **small(rng))
    assert int(found.num_nans) == int(flat.isnan().sum())
    for i, t in enumerate(tensors):
        if flat.isnan().any():
            assert torch.equal(bits(t), bits(before[i]))
            continue
        assert torch.equal(totals[i, :2], torch.stack([goes[i].sum(), torch.split(gone, numels)[i].sum()]))
        if writes_mask:
            assert torch.equal(masks[i], ~goes[i])
        assert torch.equal(bits(t), bits(before[i] if writes_mask else zeroed(before[i], goes[i])))
    for c, (row, n) in enumerate(zip(found.states.tolist(), k, strict=True)):  # the highest key that is pruned
        here = [j for j in range(num) if competitions[j] == c]
        if score == "keys" and n:
            assert row[2] == max(int(before[j][goes[j]].max()) for j in here if goes[j].any())


@pytest.mark.parametrize("score", ["magnitude", "random"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled(4)
def test_columns_of_a_matrix(score: ScoreName, seed: int) -> None:
    """As tensor parallelism over rows of FSDP leaves them: runs of a row each."""
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 12)), int(rng.integers(12, 90))
    whole, seeds = awkward(rng, rows * columns, DTYPES[rng.integers(3)]).view(rows, columns), (3, 1 << 31)
    scores = whole.double().abs().view(-1) if score == "magnitude" else hashed(seeds, np.arange(whole.numel()))
    k = int(rng.integers(whole.numel() + 1))
    goes = lowest(scores, whole.view(-1) == 0, np.zeros(whole.numel(), dtype=int), [k])
    parts, pieces, start = [], [], 0
    for part in whole.tensor_split(3, dim=1):
        runs = (((0, rows),), ((start, start + part.shape[1]),))
        parts.append(part.contiguous())
        pieces += pieces_of(Geometry((rows, columns), runs), Piece(parts[-1], seeds=seeds))
        start += part.shape[1]
    prune_pieces(Alone(), pieces, [k], [whole.numel()], keys_for(score, [whole.dtype]), **small(rng))
    assert torch.equal(bits(torch.cat(parts, 1)), bits(zeroed(whole, goes)))


@pytest.mark.parametrize("first", [3_000, (1 << 32) - 100, (1 << 40) + 5])
def test_far_positions(first: int) -> None:
    rng = np.random.default_rng(first)
    w, seeds, k = awkward(rng, 300, torch.float32), (5, 9), 120
    goes = lowest(hashed(seeds, np.arange(first, first + 300)), w == 0, np.zeros(300, dtype=int), [k])
    wanted, keys = zeroed(w, goes), keys_for("random", [w.dtype])
    pieces = [Piece(w, flat=first, seeds=seeds)]
    prune_pieces(Alone(), pieces, [k], [first + 300], keys, bits=8, num_samples=64, block=128)
    assert torch.equal(bits(w), bits(wanted))
