"""The end of the process, and a terminal that may be gone: showing things never decides about the work."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from typing import Literal, NoReturn

from typing_extensions import override


def open_standard_streams() -> None:
    """Open what the caller has closed onto nothing: the next file would get its number, and what is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def forgive_lost_output(name: Literal["stdout", "stderr"]) -> None:
    """Lose, from here on and without a word, what this standard stream does not take: it is closed, or full."""
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
        said = {"message": {"message": text.strip(), "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(said, file)


def end(code: int) -> NoReturn:
    """End the process with ``code``, at once.

    Not by leaving the interpreter: threads of torch that it stops may abort the process, and with a rank gone they
    could wait for it.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if code == 0 and mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    os._exit(code)
