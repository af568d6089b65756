"""Loops over host memory that read it once, compiled by numba where that is installed: the extra ``fast``.

What calls them has a form in numpy beside them, which reads several times and comes to the same bits; ranks may differ.
Level 0: imports nothing of the package.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

__all__ = ["compiled"]


def compiled() -> ModuleType | None:
    """Return the module of the loops; ``None`` without numba, or where ``NUMBA_DISABLE_JIT`` is set.

    A loop is compiled for a dtype when it is first called with it, in about half a second, and kept in numba's cache.
    """
    return _loops()


@cache
def _loops() -> ModuleType | None:
    try:
        numba = importlib.import_module("numba")
    except ImportError:  # not there, or not for this numpy
        return None
    return None if numba.config.DISABLE_JIT else importlib.import_module("distprune.kernels.loops")
