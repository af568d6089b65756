"""Whose mistake an error is. What a check of ours raised says itself what to mend; any other error is ours to mend.

A check is a ``raise`` of this library, also of what it makes of another library's error. Nobody expected an error that
comes out of a call: ``zip`` of unequal lengths, an attribute of ``None``; but for what the system says of files.
"""

from __future__ import annotations

import dis
import errno
import inspect
import os
import traceback
from pathlib import Path

_OURS = str(Path(__file__).parent) + os.sep
_HINTS = _OURS + "hints.py"  # it wraps functions
_RAISE = dis.opmap["RAISE_VARARGS"]
_KINDS = (ValueError, TypeError, NotImplementedError, OSError, ImportError)
# What the system says of a disk, or of a process's limits, without naming a file.
_OF_SYSTEM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE}
_ELSEWHERE = "_trace_of_another_rank"  # on an exception
_MOST = 4000  # characters of a traceback that travels


def is_expected(error: BaseException) -> bool:
    """Return whether a check raised ``error``, or the system said it of a file: then its text is all that helps."""
    if not isinstance(error, _KINDS) or was_told(error):
        return False
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _OF_SYSTEM):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(_OURS):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE


def called_from_outside() -> str:
    """Return the name of the function of this library that somebody else has called, within which this is."""
    name, frame = "", inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS) and code.co_filename != _HINTS:
            name = code.co_qualname
        frame = frame.f_back
    return name


def is_ours(kind: type) -> bool:
    """Return whether ``kind`` is a class of this library, and not a user's."""
    return kind.__module__.startswith("distprune.")


def trace_of(error: BaseException) -> str:
    """Return the traceback, or its end, of an ``error`` that nobody expected, for other ranks; of others nothing."""
    return "" if is_expected(error) else "".join(traceback.format_exception(error))[-_MOST:]


def tell_trace(error: BaseException, rank: int, trace: str) -> None:
    """Have ``error``, which stands for that of ``rank``, show where nobody expected it."""
    error.add_note(f"On rank {rank}:\n{trace}")
    setattr(error, _ELSEWHERE, True)


def was_told(error: BaseException) -> bool:
    """Return whether ``error`` stands for one that nobody expected on another rank."""
    return getattr(error, _ELSEWHERE, False)
