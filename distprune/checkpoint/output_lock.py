"""One job at a time writes to an output, and tidies up after those that were killed.

While a job runs it holds a lock on a hidden file beside its output, ``.NAME.lock``, in which its process,
host and start stand. The system lets go of the lock when the process ends, on whatever host. Whoever holds
it may remove what others have left: ``.NAME.partial-XXXXXXXX``, and ``.NAME.replaced-XXXXXXXX``, which
becomes the output again where the job was killed before its own took that place.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distprune.collectives import Communicator, together

__all__ = ["locking", "remove_files"]


@contextmanager
def locking(comm: Communicator, path: Path) -> Iterator[None]:
    """Hold the lock of the output ``path``, on the first rank, while the body runs; make its parents.

    Every rank must enter it; one round of 64 bytes. Leftovers of killed jobs are removed on entering, and
    the body's own on leaving.

    Raises:
        OSError: on every rank: another job holds it, and the message says which; or its parent is not writable.
    """
    file = path.parent / f".{path.name}.lock"
    held: int | None = None
    try:
        with together(comm):
            if comm.rank == 0:
                held = _lock(file, path)
                _tidy(path)
        yield
    finally:
        if held is not None:
            try:
                with suppress(Exception):  # the job is done
                    _tidy(path)
            finally:  # SIGTERM may have come meanwhile
                with suppress(Exception):
                    file.unlink()  # still held: a job that has it open finds that it is gone, and makes a new one
                os.close(held)


def _lock(file: Path, path: Path) -> int:
    """Return the descriptor that holds the lock."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, is_new = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            try:
                descriptor, is_new = os.open(file, os.O_RDWR | os.O_NOFOLLOW), False
            except FileNotFoundError:
                continue
        except OSError as error:
            raise PermissionError(f"the output cannot be written in {path.parent}: {error}") from error
        try:
            _claim(descriptor, is_new, file, path)
            # Otherwise it is the file of a job that ended meanwhile.
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                os.ftruncate(descriptor, 0)
                started = time.strftime("%Y-%m-%d %H:%M:%S")
                os.write(descriptor, f"process {os.getpid()} on {platform.node()} since {started}".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _claim(descriptor: int, is_new: bool, file: Path, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        has_locks = isinstance(error, BlockingIOError)
        if is_new and not has_locks:
            return  # on a file system without locks, having made the file is the lock
        holder = os.read(descriptor, 200).decode(errors="replace") or "another job"
        way_out = "wait for it or name another output" if has_locks else f"if that job is gone, remove {file}"
        raise OSError(f"the output {path} is being written by {holder}; {way_out}") from error


def _tidy(path: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(path.name)}\.(partial|replaced)-[0-9a-f]{{8}}")
    for left in sorted(path.parent.iterdir()):
        match = pattern.fullmatch(left.name)
        if match and match[1] == "replaced" and not (path.exists() and any(path.iterdir())):
            left.rename(path)
        elif match:
            remove_files(left)


def remove_files(folder: Path) -> None:
    """Remove a directory and the files in it, as far as that goes; never what lies deeper."""
    with suppress(OSError):
        for entry in folder.iterdir():
            entry.unlink()
        folder.rmdir()
