"""An empty figure of matplotlib, for the pictures beside reports."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from distprune.checkpoint import import_extra
from distprune.checkpoint.disk import write_whole

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


def png_of(figure: Any) -> bytes:
    """Return ``figure``, of :func:`new_figure`, as a PNG file has it."""
    written = io.BytesIO()
    figure.canvas.print_png(written)
    return written.getvalue()


def write_png(figure: Any, path: str | Path) -> None:
    """Write ``figure`` into the file ``path``, whole or not at all. Local.

    Raises:
        ValueError: the file is no ``.png``.
        OSError: it cannot be written.
    """
    check_picture(path)
    write_whole(Path(path), png_of(figure), sync=False)


def check_picture(path: str | Path) -> None:
    """Raise a ValueError if the file ``path`` is no ``.png``."""
    if Path(path).suffix != ".png":
        raise ValueError(f"{path} is no name of a picture; name a file such as picture.png")
