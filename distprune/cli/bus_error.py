"""A line where a weight file becomes shorter while it is mapped: the system kills a process that reads beyond the end.

Reads in the place of maps would raise an ordinary error; choosing over all of a streamed checkpoint then took 1.3 to
1.5 times the CPU time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

from distprune.checkpoint.stored_slices import mapped_file_at

_ADDRESS_AT = 16  # in Linux's siginfo_t of 64 bits: where the process has read
_WITH_INFORMATION = 4  # SA_SIGINFO
_kept: list[Any] = []  # what the system may call as long as there is this process


class _Action(ctypes.Structure):
    """glibc's and musl's ``struct sigaction``."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def explain_bus_errors() -> None:
    """Have SIGBUS end the process with code 1 and a line that names the file, on Linux, unless somebody handles it.

    The handler runs Python in the thread that was stopped. That works where the thread was reading weights, in torch or
    numpy, with Python's lock or without.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return
    library = ctypes.CDLL(None)
    before = _Action()
    library.sigaction(signal.SIGBUS, None, ctypes.byref(before))
    if before.handler:
        return
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(_end)
    action = _Action(handler=ctypes.cast(handler, ctypes.c_void_p), flags=_WITH_INFORMATION)
    _kept.append(handler)
    library.sigaction(signal.SIGBUS, ctypes.byref(action), None)


def _end(_: int, information: int, __: int) -> None:
    path = mapped_file_at(ctypes.c_uint64.from_address(information + _ADDRESS_AT).value)
    said = f"{path} has become shorter while it was read" if path else "the system cannot read a part of its memory"
    os.write(2, f"error: {said} (SIGBUS)\n".encode())
    os._exit(1)
