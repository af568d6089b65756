"""An empty figure of matplotlib, for the pictures beside reports."""

from __future__ import annotations

from typing import Any

from distprune.checkpoint import import_extra

_DOTS_PER_INCH = 150


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of so many inches, on an Agg canvas.

    Raises:
        ImportError: the extra ``plot`` is not installed.
    """
    # Not through pyplot, which may open windows and changes settings of the process.
    make = import_extra("matplotlib.figure", "plot").Figure
    figure = make(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")
    import_extra("matplotlib.backends.backend_agg", "plot").FigureCanvasAgg(figure)
    return figure
