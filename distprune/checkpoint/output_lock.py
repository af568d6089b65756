"""One job at a time writes to an output, and tidies up after those that were killed.

While a job runs it holds a lock on a hidden file beside its output, ``.NAME.lock``, in which its process,
host and start stand. The system lets go of the lock when the process ends, on whatever host. Whoever holds
it may remove what others have left: what was written in part, the folder of a resumable job whose result has become
the output, and the directory that was replaced, which becomes the output again where the job was killed before its own
took that place.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from distprune.checkpoint.disk import partial_of
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator

RECIPE_NAME, RESULT_NAME = "recipe.json", "model"  # in the folder of a job that can go on
_PATIENCE = 0.2  # seconds: the job before may just be removing its lock


def replaced_of(path: Path) -> Path:
    """Return where the directory ``path`` is while another one takes its place. Local."""
    return path.with_name(f".{path.name}.replaced-distprune")


def unfinished_of(path: Path) -> Path:
    """Return where a job that can go on keeps what it has done, of the output ``path``. Local."""
    return path.with_name(f".{path.name}.unfinished")


@contextmanager
def locking(comm: Communicator, path: Path) -> Iterator[None]:
    """Hold the lock of the output ``path``, on the first rank, while the body runs; make its parent.

    Every rank must enter it; one round of 64 bytes. Leftovers of killed jobs are removed on entering, and
    the body's own on leaving.

    Raises:
        OSError: on every rank: another job holds it, and the message says which; or its parent is not writable.
    """
    with ExitStack() as at_end:
        with together(comm):
            if comm.rank == 0:
                lock = _lock(path)
                at_end.callback(_let_go, lock, path)
                _tidy(path)
        yield


def _lock(path: Path) -> FileLock:
    """Return the lock, which is held. Where a file system has no locks, filelock's file is there while it is held."""
    file = path.parent / f".{path.name}.lock"
    lock = FileLock(file, timeout=_PATIENCE)
    try:
        path.parent.mkdir(exist_ok=True)
        lock.acquire()
        file.write_text(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    except OSError as error:
        if not isinstance(error, Timeout) or not os.path.lexists(file):
            raise PermissionError(f"the output cannot be written in {path.parent}: {error}") from error
        holder = "another job"
        with suppress(OSError):
            holder = " ".join(file.read_text(errors="replace").split()) or holder
        raise OSError(
            f"the output {path} is being written by {holder}; wait for it or name another output, or, if that job is "
            f"gone, remove {file}"
        ) from error
    return lock


def _let_go(lock: FileLock, path: Path) -> None:
    with suppress(Exception):  # the job is done
        _tidy(path)
    with suppress(Exception):
        os.unlink(lock.lock_file)  # still held: a job that has it open sees that, and makes a new one
    with suppress(Exception):  # the system lets go of it when the process ends
        lock.release()


def _tidy(path: Path) -> None:
    remove_tree(partial_of(path))
    with suppress(OSError):  # the output has taken its place, or nothing was replaced
        replaced_of(path).rename(path)
    if path.is_dir():
        remove_tree(replaced_of(path))
    unfinished = unfinished_of(path)
    if (unfinished / RECIPE_NAME).exists() and not (unfinished / RESULT_NAME).exists():
        remove_tree(unfinished)


def remove_tree(path: Path) -> None:
    """Remove what a job has made or replaced, and all in it, as far as that goes; no link is followed."""
    shutil.rmtree(path, ignore_errors=True)  # leaves a file or a link alone
    with suppress(OSError):
        path.unlink()
