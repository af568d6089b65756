"""Keep a process from growing while blocks come and go: hand freed memory back to the system."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

_SLACK = 32 << 20  # bytes a process may grow by before it is looked after; each time costs page faults


class FreeMemory:
    """What the C library (glibc; elsewhere nothing is done) keeps of freed memory.

    Blocks reuse memory, so it is kept. But small tensors that outlive a block sit in the hole it leaves, the next block
    is put behind, and the process may grow with every block: above 32 MiB of growth the memory is trimmed.
    """

    def __init__(self) -> None:
        self._usual: int | None = None  # resident after a block

    def give_back(self) -> None:
        """After a block: give it back if the process is 32 MiB larger than after the first block since it last did."""
        trim, resident = _malloc_trim(), _resident_bytes()
        if self._usual is None:
            self._usual = resident
        elif trim is not None and resident - self._usual > _SLACK:
            trim(0)
            self._usual = None


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
