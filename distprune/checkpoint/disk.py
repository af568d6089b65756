"""Files that are whole or not there, and waiting for the disk.

``fsync`` has the kernel put on the disk what it holds of a file; what another machine's kernel holds, it knows nothing
of. So every rank syncs what it has written.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path


def sync_file(path: Path) -> None:
    """Wait until the file or directory ``path`` is on the disk. Local."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_of(path: Path, token: str = "") -> Path:
    """Return where ``path`` is written before it is whole; ``token``: what makes the name new. Local."""
    return path.with_name(f".{path.name}.partial-{token or secrets.token_hex(4)}")


def whole_name(name: str) -> str | None:
    """Return the name of what a killed process has left in part, under a name of :func:`partial_of`. Local."""
    found = re.fullmatch(r"\.(.+)\.partial-[0-9a-f]{8}", name)
    return found and found[1]


def put_in_place(partial: Path, path: Path, *, overwrite: bool) -> None:
    """Rename the file ``partial`` to ``path``, in one step, and over a file that is there only to ``overwrite``. Local.

    Raises:
        FileExistsError: something is there, and ``overwrite`` is off.
    """
    if overwrite:
        partial.replace(path)
        return
    try:
        os.link(partial, path)
    except OSError as error:
        if os.path.lexists(path):
            raise FileExistsError(f"{path} has been written by someone else meanwhile") from error
        partial.rename(path)  # on a file system without hard links
    else:
        partial.unlink()


def write_whole(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write ``content`` into the file ``path`` of a folder of ours, whole or not at all. Local; for one rank.

    ``sync``: wait for the disk.

    Raises:
        OSError: the disk is full or not writable.
    """
    beside = partial_of(path)
    beside.touch(exist_ok=False)  # where nothing may be, not even a link
    try:
        beside.write_bytes(content)
        if sync:
            sync_file(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
