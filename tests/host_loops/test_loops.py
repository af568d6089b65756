"""Each loop does what a few lines of numpy say, at every length, and is not there without numba."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from distprune import host_loops
from distprune.jobs import StreamedJob, run_streamed_job
from tests.hf_models import make_model

Array = npt.NDArray[Any]
DTYPES = (np.int16, np.int32, np.int64)
NUMS = (1, 12, 4095, 4096, 4097, 12_300)  # tiles are of 4096


@pytest.fixture
def loops() -> ModuleType:
    found = host_loops.compiled()
    if found is None:
        pytest.skip("needs numba; pip install 'distprune[fast]'")
    return found


def made(dtype: Any, num: int) -> tuple[Array, Any]:
    """Return bits of both signs, many of them equal, and what makes them keys."""
    generator = np.random.default_rng(num)
    magnitude = dtype(np.iinfo(dtype).max)
    bits = generator.integers(0, 40, num).astype(dtype) * dtype(np.iinfo(dtype).max // 40)
    return np.where(generator.random(num) < 0.5, bits, bits | np.iinfo(dtype).min).astype(dtype), magnitude


@pytest.mark.parametrize("dtype", DTYPES)
def test_above_and_inside(loops: ModuleType, dtype: Any) -> None:
    for num in NUMS:
        bits, magnitude = made(dtype, num)
        for factor in (magnitude, dtype(-1)):  # -1: they are keys already
            keys = bits & factor
            low, high = np.sort(keys)[[num // 3, num // 2]]
            keep, offsets, found = np.empty(num, dtype=np.bool_), np.empty(num, dtype=np.int64), np.empty_like(bits)
            first = np.sort(keys)[num // 4]
            counts = ((keys > low).sum(), (keys < first).sum())
            assert loops.keep_above(bits, factor, first, low, keep, None) == counts
            assert np.array_equal(keep, keys > low)
            left, in_place = np.where(keys > low, bits, 0), bits.copy()
            for out in (found, in_place):
                read = bits if out is found else in_place
                assert loops.keep_above(read, factor, first, low, out, dtype(0)) == counts
                assert np.array_equal(out, left)
            num_kept, num_inside, *extremes = loops.find_inside(bits, factor, low, high, offsets, found)
            inside = np.flatnonzero((keys >= low) & (keys <= high))
            assert (num_kept, num_inside, *extremes) == ((keys >= low).sum(), len(inside), keys.min(), keys.max())
            assert np.array_equal(offsets[:num_inside], inside)
            assert np.array_equal(found[:num_inside], keys[inside])


@pytest.mark.parametrize("dtype", [*DTYPES, np.float32, np.float64])
@pytest.mark.sampled(2)
def test_groups(loops: ModuleType, dtype: Any) -> None:
    for m, num in itertools.product((1, 2, 3, 4, 7, 8, 16), NUMS):
        bits, magnitude = made(np.int64 if np.issubdtype(dtype, np.floating) else dtype, num - num % m + m)
        keys = (bits & magnitude).astype(dtype)
        order = np.argsort(keys.reshape(-1, m), axis=1, kind="stable")
        for n in {0, 1, m // 2, m}:
            expected, keep = np.empty((len(keys) // m, m), dtype=np.bool_), np.empty(len(keys), dtype=np.bool_)
            np.put_along_axis(expected, order, np.arange(m) >= m - n, axis=1)
            loops.keep_groups(keys, n, m, keep)
            assert np.array_equal(keep, expected.ravel())
            if keys.dtype == bits.dtype:
                keep[:] = True
                extremes = keys.min(), keys.max()
                assert loops.keep_groups_of_bits(bits, magnitude, n, m, keep, None) == extremes
                assert np.array_equal(keep, expected.ravel())
                left = np.full_like(bits, 7)
                assert loops.keep_groups_of_bits(bits, magnitude, n, m, left, bits.dtype.type(0)) == extremes
                assert np.array_equal(left, np.where(keep, bits, 0))


@pytest.mark.parametrize("why", ["missing", "switched off"])
def test_there_are_none(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "missing":
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        numba = pytest.importorskip("numba")
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr(host_loops, "_loaded", None)
    assert not host_loops.load()
    assert host_loops.compiled() is None


def test_a_large_share_of_a_checkpoint_is_worth_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    make_model(tmp_path / "model", "gpt2")
    monkeypatch.setattr(host_loops, "_loaded", None)
    for num_bytes, loads in ((1 << 30, False), (0, True)):
        monkeypatch.setattr("distprune.jobs.streamed._COMPILED_BYTES", num_bytes)
        run_streamed_job(StreamedJob(model=f"{tmp_path}/model", output=f"{tmp_path}/{loads}", pattern="2:4"))
        assert (host_loops.compiled() is not None) == loads
    one, other = (tmp_path / f"{loads}" / "model.safetensors" for loads in (False, True))
    assert one.read_bytes() == other.read_bytes()
