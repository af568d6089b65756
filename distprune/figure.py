"""Figures of matplotlib, for the pictures beside reports."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.outputs import writing
from distprune.collectives.communicator import Alone


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure of so many inches.

    Raises:
        ImportError: the extra ``plot`` is not installed.
    """
    # Not through pyplot, which may open windows and changes settings of the process.
    return import_extra("matplotlib.figure", "plot").Figure(figsize=(width, height), dpi=150, layout="constrained")


def png_of(figure: Any) -> bytes:
    """Return ``figure``, of :func:`new_figure`, as a PNG file has it."""
    written = io.BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


def saved(figure: Any, path: str | Path | None, *, overwrite: bool) -> Any:
    """Return ``figure``; write it to ``path``, if that is given, whole or not at all. Local.

    Raises:
        ValueError: the file is no ``.png``, is a link, or lies in a model's directory.
        FileExistsError: it is there, and ``overwrite`` is off.
        OSError: it cannot be written.
    """
    if path is not None:
        if Path(path).suffix != ".png":
            raise ValueError(f"{path} is no name of a picture; name a file such as picture.png")
        with writing(path, Alone(), overwrite=overwrite, is_file=True) as staging:
            staging.write_bytes(png_of(figure))
    return figure
