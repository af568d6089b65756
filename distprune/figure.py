"""An empty figure of matplotlib, for the pictures beside reports."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.outputs import writing
from distprune.checkpoint.replaceable import check_file
from distprune.collectives.communicator import Alone

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


def write_png(figure: Any, path: str | Path, *, overwrite: bool) -> None:
    """Write ``figure`` into the file ``path``, whole or not at all. Local; raises as :func:`check_picture`."""
    check_picture(path, overwrite=overwrite)
    with writing(path, Alone(), overwrite=overwrite, is_file=True) as staging:
        staging.write_bytes(png_of(figure))


def check_picture(path: str | Path, *, overwrite: bool) -> None:
    """Raise if a picture must not be written to ``path``. Local.

    Raises:
        ValueError: the file is no ``.png``, is a link, or lies in a model's directory.
        FileExistsError: it is there, and ``overwrite`` is off.
        OSError: it cannot be written.
    """
    if Path(path).suffix != ".png":
        raise ValueError(f"{path} is no name of a picture; name a file such as picture.png")
    check_file(path, overwrite=overwrite)
