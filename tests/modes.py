"""Files that even root may not read."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["obeying_modes"]

# linux/capability.h
_VERSION_3 = 0x20080522
_READ_AND_WRITE_ALL = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def obeying_modes() -> Iterator[None]:
    """Have this thread obey the modes of files, also as root. Linux."""
    if os.geteuid():
        yield
        return
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; and of the upper 32 again
    assert library.capget(header, data) == 0
    before = data[0]
    data[0] = before & ~_READ_AND_WRITE_ALL
    assert library.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = before
        assert library.capset(header, data) == 0
