"""One file that a user names: where it may be written, and how it takes its place.

It is written beside its place, under a name that nothing had, and takes it when it is whole: nothing is written
through a link, and nothing is lost that was not to be replaced. What a killed job leaves is hidden, and the next one
that writes there removes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distprune.checkpoint.disk import put_in_place, sync_file
from distprune.checkpoint.output_directory import ending_together, make_staging
from distprune.checkpoint.output_lock import locking
from distprune.checkpoint.replaceable import Inputs, holds_model, lies_in
from distprune.collectives.agree import together
from distprune.collectives.communicator import Group, communicator


def check_file(target: str | Path, *, overwrite: bool = False, inputs: Inputs = (), num_bytes: int = 0) -> Path:
    """Return ``target`` as an absolute path if a file may be written there. Local; changes nothing.

    ``inputs`` are files and directories that are read; ``num_bytes``: how large the file will be, at least.

    Raises:
        FileExistsError: something is there, and it is no file, or ``overwrite`` is off.
        FileNotFoundError, IsADirectoryError: its directory is not there, or it is a directory itself.
        PermissionError: its directory is not writable.
        ValueError: it has no name, is a link or an input, or lies in an input or in a model's directory.
        OSError: the disk has no room for it.
    """
    if not Path(target).name:
        raise ValueError(f"the output {str(target)!r} names no file")
    # Links above it are followed: what is beside the target must be beside the file itself.
    folder = Path(os.path.realpath(Path(target).parent))
    path = folder / Path(target).name
    if not folder.is_dir():
        raise FileNotFoundError(f"the output {target} cannot be made: there is no directory {folder}")
    if path.is_symlink():
        raise ValueError(f"the output {target} is a link to {os.readlink(path)}; name the file itself")
    if path.is_dir():
        raise IsADirectoryError(f"{target} is a directory; name a file, such as {Path(target) / 'output'}")
    for given in inputs:
        if lies_in(path, given):
            raise ValueError(f"the output {target} is, or lies in, the input {given}; write elsewhere")
    for parent in path.parents:
        if holds_model(parent):
            raise ValueError(f"the output {target} lies in {parent}, which is a model's directory; write elsewhere")
    if path.exists():
        if not path.is_file():
            raise FileExistsError(f"{target} is there and is no file; name another output")
        if not overwrite:
            raise FileExistsError(f"{target} is there; name another output, or pass overwrite=True (--overwrite)")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"the output {target} cannot be made: {folder} is not writable")
    if num_bytes > (free := shutil.disk_usage(folder).free):
        raise OSError(f"the output {target} takes {num_bytes:,} bytes, and its disk has {free:,} free")
    return path


@contextmanager
def writing_file(
    target: str | Path, group: Group = None, *, overwrite: bool = False, inputs: Inputs = (), num_bytes: int = 0
) -> Iterator[Path]:
    """Yield an empty file beside ``target``, locked; put it in its place when the body ends on every rank.

    Every rank of ``group`` must enter it, and see ``target``. The body may communicate. If it raises, on all ranks or
    on one that no other is waiting for in the body, all raise and ``target`` is as it was. What other ranks than the
    first have written they must have synced.

    Rounds: a name (two rounds), and seven of 64 bytes.

    Raises:
        OSError, ValueError: on every rank: what :func:`check_file` raises, another job writes there, writing fails, or
            ranks were given different arguments.
        FileExistsError: on every rank: ``target`` has appeared meanwhile, and ``overwrite`` is off.
    """
    comm = communicator(group)

    def check() -> Path:
        return check_file(target, overwrite=overwrite, inputs=inputs, num_bytes=num_bytes)

    def make(staging: Path) -> None:
        check()  # now that it is locked
        staging.touch(exist_ok=False)  # where nothing may be, not even a link

    with together(comm, output=str(target), overwrite=overwrite):
        path = check()
    with locking(comm, path):
        staging = make_staging(comm, path, make)
        with ending_together(comm):
            yield staging
        with together(comm):
            if comm.rank == 0:
                sync_file(staging)
                put_in_place(staging, path, overwrite=overwrite)
                sync_file(path.parent)
