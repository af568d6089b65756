"""N:M, rows and held zeros by kernels equal plain forms, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels import interpreted  # noqa: F401  # first

from distprune.kernels.held import Tables, count_zeros, read_all_held, zero_where_masked  # isort: skip
from distprune.kernels.lowest import Keys  # isort: skip
from distprune.kernels.table import Piece  # isort: skip
from distprune.kernels.within import MOST_IN_GROUP, MOST_IN_ROW, Within  # isort: skip
from distprune.patterns.n_by_m import NByM  # isort: skip
from distprune.patterns.within_rows import PerRow  # isort: skip
from distprune.shards.matrix import Matrix  # isort: skip
from distprune.masks.in_place import read_held, write_signed_zeros  # isort: skip
from tests.device_path import counted_waits  # isort: skip
from tests.kernels.cases import DTYPES, awkward, bits, keys_for, zeroed  # isort: skip


def rows_that_go(keys: torch.Tensor, gone: torch.Tensor, num_lowest: int) -> torch.Tensor:
    order = torch.where(gone, -(2.0**40), keys.double()).sort(dim=1, stable=True).indices
    goes = torch.zeros_like(gone).scatter_(1, order[:, :num_lowest], True)
    return goes | gone


def made(kind: str, pieces: list[Piece], length: int, num: int, keys: Keys, totals: torch.Tensor) -> Within:
    if kind == "rows":
        return Within(pieces, (kind, length, num), keys, totals, widest=64 >> (num % 4 == 1))
    return Within(pieces, (kind, length - num, length), keys, totals, lanes=64)


def run(
    kind: str, tensors: list[torch.Tensor], length: int, num: int, keys: Keys
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    masks = [torch.ones(t.numel(), dtype=torch.bool) for t in tensors]
    pieces = [Piece(t, i, out=mask) for i, (t, mask) in enumerate(zip(tensors, masks, strict=True))]
    totals = torch.zeros((len(tensors), 3), dtype=torch.int64)
    made(kind, pieces, length, num, keys, totals).write()
    if keys.score != "keys":  # in place: the same, if nothing is NaN
        written = [t.clone() for t in tensors]
        in_place = torch.zeros_like(totals)
        units = made(kind, [Piece(t, i) for i, t in enumerate(written)], length, num, keys, in_place)
        units.count_nans()
        assert torch.equal(in_place[:, 2], totals[:, 2])
        units.write(num_nans := in_place[:, 2].sum())
        assert torch.equal(in_place, totals) or num_nans
        for t, mask, new in zip(tensors, masks, written, strict=True):
            assert torch.equal(bits(new), bits(t if num_nans else zeroed(t, ~mask)))
    return totals, masks


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("kind", ["rows", "groups"])
@pytest.mark.sampled(16)
def test_each_row_and_group_by_itself(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    length = int(
        rng.choice([1, 5, 16, 48, 64, 100]) if kind == "rows" else rng.choice([2, 3, 4, 5, 8, 12, 16, MOST_IN_GROUP])
    )
    num = int(rng.integers(0, length + 1) if kind == "rows" else rng.integers(1, length))
    dtype = DTYPES[rng.integers(3)]
    nums = (0, 1, 3) if kind == "rows" else (0, 1, 5, 16, 33)
    tensors = [awkward(rng, int(rng.choice(nums)) * length, dtype) for _ in range(2)] + [awkward(rng, length, dtype)]
    keys = keys_for("magnitude", [dtype], "zeros" if seed % 3 else "unmarked")
    gone = [(t == 0) & (keys.marked == "zeros") for t in tensors]
    if seed % 4 == 0:
        tensors = [
            torch.from_numpy(rng.integers(-(1 << 31) + 1, 1 << 30, t.numel()) >> rng.integers(30)).int()
            for t in tensors
        ]
        keys = Keys("keys", -(1 << 31), (1 << 30) - 1)
        gone = [torch.zeros_like(t, dtype=torch.bool) for t in tensors]
    totals, masks = run(kind, tensors, length, num, keys)
    for i, (t, zero) in enumerate(zip(tensors, gone, strict=True)):
        scores = t.abs() if keys.score == "magnitude" else t
        goes = rows_that_go(scores.view(-1, length), zero.view(-1, length), num)
        assert totals[i].tolist() == [int(goes.sum()), int(zero.sum()), 0]
        assert torch.equal(masks[i], ~goes.view(-1))


@pytest.mark.parametrize("kind", ["rows", "groups"])
def test_nans_and_the_largest_keys(kind: str) -> None:
    tensors = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, torch.nan, -torch.nan, 4.0])]
    totals, _ = run(kind, tensors, 4, 2, keys_for("magnitude", [torch.float32]))
    assert totals[:, 2].tolist() == [0, 2]
    most = torch.full((8,), (1 << 31) - 1, dtype=torch.int32)
    totals, masks = run(kind, [most], 4, 3, Keys("keys", -(1 << 31), (1 << 31) - 1))
    assert masks[0].tolist() == [False, False, False, True] * 2


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("pattern", [NByM(2, 4), PerRow(0.5)], ids=str)
def test_scores_that_lie_otherwise(pattern: NByM | PerRow) -> None:
    rng = np.random.default_rng(0)
    for _ in range(9):  # a kernel that reads memory that is free sees, as a rule, what has come there since
        scores = torch.from_numpy(rng.integers(1, 1000, (4, 2)).astype(np.int32)).t()
        assert torch.equal(pattern.keep(scores), pattern.keep(scores.long()))


@pytest.mark.usefixtures("interpreted")
def test_rows_of_more_than_the_kernel_counts() -> None:
    num = MOST_IN_ROW + 1
    scores = torch.arange(2 * num, dtype=torch.int32).view(2, num)
    assert torch.equal(PerRow(0.5).keep(scores), (torch.arange(num) >= num // 2).expand(2, num))
    assert PerRow(0.5).kernel(Matrix(1, num)) is None
    assert PerRow(0.5).kernel(Matrix(1, num - 1)) is not None


@pytest.mark.parametrize("how", ["kernels", "plain"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(4)
def test_held_zeros(seed: int, how: str, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(seed)
    dtypes = [(*DTYPES, torch.float64)[rng.integers(4)] for _ in range(4)]
    weights = [awkward(rng, int(rng.choice([0, 1, 9, 64, 300, 2000])), dtype) for dtype in dtypes]
    weights.append(awkward(rng, 60, torch.float32).view(6, 10).t())  # scattered
    if how == "kernels":
        request.getfixturevalue("interpreted")
    zeros = [torch.from_numpy(rng.integers(0, 2, tuple(w.shape)) == 1) for w in weights]
    least = torch.from_numpy(rng.integers(0, 3, len(weights)) * 100)
    pairs, tables, wanted = list(zip(weights, zeros, strict=True)), Tables(), [mask.clone() for mask in zeros]
    read_all_held(pairs, torch.full_like(least, 1 << 40), tables)  # more than there are: the masks stay as they are
    with counted_waits() as waits:
        totals = read_all_held(pairs, least, tables)
    assert not waits.calls
    for i, (w, mask) in enumerate(zip(weights, wanted, strict=True)):
        if w.numel():
            assert totals[i].tolist() == [*map(int, read_held(w, mask, int(least[i])))]
        assert torch.equal(zeros[i], mask)
        w.copy_(awkward(rng, w.numel(), w.dtype).view(w.shape))
    plain, versions = [w.clone() for w in weights], [w._version for w in weights]
    zero_where_masked(pairs, True, tables, signs=1)
    assert all(w._version > version for w, version in zip(weights, versions, strict=True))
    for w, other, mask in zip(weights, plain, zeros, strict=True):
        write_signed_zeros(other, mask, where=True)
        assert torch.equal(bits(w), bits(other))
    for dtype in {*dtypes}:
        some, masks = [w for w in weights if w.dtype is dtype], [z for w, z in pairs if w.dtype is dtype]
        assert count_zeros(some) == [int((w == 0).sum()) for w in some]
        held = [(bits(w) == 0) & mask for w, mask in zip(some, masks, strict=True)]
        assert count_zeros([*map(bits, some)], masks) == count_zeros([~each for each in held])
    for where in (True, False, True):
        for w in weights:
            w.copy_(awkward(rng, w.numel(), w.dtype).view(w.shape))
        plain = [zeroed(w, mask == where) for w, mask in zip(weights, zeros, strict=True)]
        zero_where_masked(pairs, where, tables)
        assert all(torch.equal(bits(w), bits(other)) for w, other in zip(weights, plain, strict=True))
    plain = [w.masked_fill(w == 0, 0.0) for w in weights]
    zero_where_masked(pairs, True, tables, signs=-1)
    assert all(torch.equal(bits(w), bits(other)) for w, other in zip(weights, plain, strict=True))
