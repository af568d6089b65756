"""Where a job writes: beside the target, renamed onto it when everything is there.

A directory of the target's name exists only as a whole model. What a job that was killed leaves behind
is a hidden sibling, ``.NAME.partial-XXXX``, which no loader takes for one and the next job ignores.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distprune.collectives import Group, agree, communicator, together

__all__ = ["check_output", "publish", "writing"]


def check_output(target: str | Path, *, overwrite: bool = False, source: str | Path | None = None) -> Path:
    """Return ``target`` as an absolute path if a model may be written there. Local; changes nothing.

    Raises:
        FileExistsError: it exists and is not empty, and ``overwrite`` is off.
        NotADirectoryError: it, or something above it, is a file.
        PermissionError: its parent, or the first one that exists, is not writable.
        ValueError: it is the model's own directory ``source``, inside it, or above it; or it is where a
            file system is mounted, onto which nothing can be renamed.
    """
    # Links are followed: what is beside the target must be beside the directory itself.
    path = Path(target).resolve()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"the output {path} is a file; name a directory")
    if source is not None:
        theirs = Path(source).resolve()
        if path == theirs or path in theirs.parents or theirs in path.parents:
            raise ValueError(f"the output {path} and the model {theirs} lie inside each other; write elsewhere")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise FileExistsError(f"the output directory {path} exists and is not empty; name another or pass --overwrite")
    if os.path.ismount(path):
        raise ValueError(f"the output {path} is a mount point and cannot be replaced; name a directory inside it")
    parent = next(folder for folder in path.parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"the output {path} cannot be made: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"the output {path} cannot be made: {parent} is not writable")
    return path


@contextmanager
def writing(
    target: str | Path, group: Group = None, *, overwrite: bool = False, source: str | Path | None = None
) -> Iterator[Path]:
    """Yield an empty directory beside ``target``; rename it onto ``target`` when the body ends on every rank.

    Every rank of ``group`` must enter it. The body may communicate. If it raises, on all ranks or on one
    that no other is waiting for in the body, all raise, what was written is removed, and ``target`` is
    as it was.

    Communicates a name once (two rounds) and four rounds of 72 bytes.

    Raises:
        OSError, ValueError: on every rank: what :func:`check_output` raises, writing fails, or ranks were
            given different arguments.
        FileExistsError: on every rank: another job has filled ``target`` meanwhile and ``overwrite`` is off.
    """
    comm = communicator(group)
    token = comm.broadcast(secrets.token_hex(4))
    agree(comm, {"output": str(target), "overwrite": overwrite})
    staging: Path | None = None
    try:
        with together(comm):
            path = check_output(target, overwrite=overwrite, source=source)
            staging = path.parent / f".{path.name}.partial-{token}"
            if comm.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                _make_writable(staging)
        with together(comm):
            if not staging.is_dir():
                raise FileNotFoundError(f"{staging} is not visible here; the output must be on storage all ranks share")
        failed: Exception | None = None
        try:
            yield staging
        except Exception as error:
            # torch reports a lost rank as a RuntimeError; to ask it would be to wait for it once more.
            if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
                raise
            failed = error
        agree(comm, {}, failed)
        with together(comm):
            if comm.rank == 0:
                publish(staging, path, overwrite=overwrite)
    except BaseException:
        # Also when this process is interrupted; what was renamed already is no longer here.
        if comm.rank == 0 and staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _make_writable(staging: Path) -> None:
    try:
        staging.mkdir()
        (staging / ".probe").write_bytes(b"")
        (staging / ".probe").unlink()
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise PermissionError(f"the output cannot be written beside {staging.parent}: {error}") from error


def publish(staging: Path, path: Path, *, overwrite: bool) -> None:
    """Rename the finished directory ``staging`` onto ``path``; what was there is removed if ``overwrite``."""
    _sync(staging)
    aside: Path | None = None
    if overwrite and path.exists():
        aside = path.parent / f".{path.name}.replaced-{secrets.token_hex(4)}"
        path.rename(aside)
    try:
        staging.rename(path)  # onto nothing or an empty directory; the system refuses any other
    except OSError as error:
        if aside is not None:
            aside.rename(path)
        elif path.is_dir() and any(path.iterdir()):
            raise FileExistsError(
                f"the output directory {path} has been filled by someone else meanwhile; name another"
            ) from error
        raise
    _sync(path.parent)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
