"""Packages that an extra brings: imported where they are used, with an error that names the extra."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, extra: str) -> Any:
    """Return the imported ``module``.

    Raises:
        ImportError: it is not installed; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ImportError(f"this needs {module}, which is not installed: pip install 'distprune[{extra}]'") from error
