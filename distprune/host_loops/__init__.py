"""Loops over host memory that read it once, compiled by numba where that is installed: the extra ``fast``.

Every caller has a NumPy fallback with identical results; ranks may mix both.
Level 0: imports nothing of the package.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["compiled", "load"]

_loaded: ModuleType | None = None


def load() -> bool:
    """Load the loops, and return whether they are there: not without numba, nor where ``NUMBA_DISABLE_JIT`` is set.

    It takes some 0.9 s with the first call, and half a second more for each loop that is not yet in numba's cache. 2:4
    in bfloat16 gets back about a nanosecond an element.
    """
    global _loaded
    try:
        numba = importlib.import_module("numba")
    except ImportError:  # not there, or not for this numpy
        return False
    if not numba.config.DISABLE_JIT:
        _loaded = importlib.import_module("distprune.host_loops.loops")
    return _loaded is not None


def compiled() -> ModuleType | None:
    """Return the module of the loops, if they were loaded."""
    return _loaded
