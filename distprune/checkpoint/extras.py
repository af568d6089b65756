"""Optional dependencies: imported where they are used, with an error that names the extra."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_extra", "new_figure"]

_DOTS_PER_INCH = 150


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


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of so many inches, on an Agg canvas.

    Raises:
        ImportError: the extra ``plot`` is not installed.
    """
    # By the objects, not pyplot: no window, and nothing of the process's own settings changes.
    make = import_extra("matplotlib.figure", "plot").Figure
    figure = make(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")
    import_extra("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    return figure
