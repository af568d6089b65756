"""Offsets are as many bytes as they need."""

from __future__ import annotations

import numpy as np
import pytest

from distprune.selection.scan import _shortened


@pytest.mark.parametrize("start", [0, (1 << 32) - (1 << 22), (1 << 32) - (1 << 22) + 1, 1 << 32, 1 << 40])
def test_offsets_of_large_shards_do_not_wrap(start: int) -> None:
    """Of a chunk, which has up to 2**22 elements."""
    offsets = np.array([0, 7, (1 << 22) - 1])
    found = _shortened(offsets, start)
    assert found.tolist() == [start, start + 7, start + (1 << 22) - 1]
    assert found.itemsize == (4 if start <= (1 << 32) - (1 << 22) else 8)
