"""Hand memory that is free inside this process back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["return_free_memory"]


def return_free_memory() -> None:
    """Return what the C library keeps of freed memory, where it is glibc; elsewhere do nothing.

    A gathered block is freed before the next one is gathered, but small tensors that outlive it sit in its
    hole, so the next one is put behind: without this, a process grows by about a block for every block.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], object] | None:
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # musl, macOS, Windows
        return None
    return found
