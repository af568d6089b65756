"""Keep a process from growing while blocks come and go: hand freed memory back to the system."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["FreeMemory"]

_SLACK = 64 << 20  # bytes a process may grow by before it is looked after; each time costs page faults


class FreeMemory:
    """What the C library (glibc; elsewhere nothing is done) keeps of freed memory.

    A gathered block is freed before the next one is gathered, but small tensors that outlive it sit in its
    hole, so the next one is put behind: by itself, a process grows by about a block for every block.
    """

    def __init__(self) -> None:
        self._resident = _resident_bytes()

    def give_back(self) -> None:
        """Give it back if the process has grown by more than 64 MiB since it last did, or since the beginning."""
        trim = _malloc_trim()
        if trim is not None and _resident_bytes() - self._resident > _SLACK:
            trim(0)
            self._resident = _resident_bytes()


def _resident_bytes() -> int:
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no Linux
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _malloc_trim() -> Callable[[int], object] | None:
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # musl, macOS, Windows
        return None
    return found
