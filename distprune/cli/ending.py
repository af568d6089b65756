"""A terminal that may be gone: showing things never decides about the work."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from typing import Literal

from typing_extensions import override


def open_standard_streams() -> None:
    """Open what the caller has closed onto nothing: the next file would get its number, and what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # takes the lowest number that is free
        pass
    os.close(number)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def ignore_write_errors(name: Literal["stdout", "stderr"]) -> None:
    """From now on ignore write errors on this stream: it is closed, or its disk is full."""
    stream = getattr(sys, name)
    if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
        buffer = io.BufferedWriter(_Forgiving(stream.fileno(), "wb", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True))


class _Forgiving(io.FileIO):
    @override
    def write(self, data: object, /) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def tell_torchrun(text: str) -> None:
    """Let torchrun repeat why this rank ends in its own report, the last thing it prints."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": {"message": text.strip(), "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(message, file)
