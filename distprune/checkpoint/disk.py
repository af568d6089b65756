"""Files that are whole or not there, and waiting for the disk.

``fsync`` has the kernel put on the disk what it holds of a file; what another machine's kernel holds, it knows nothing
of. So every rank syncs what it has written.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def sync_file(path: Path) -> None:
    """Wait until the file or directory ``path`` is on the disk. Local."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_of(path: Path) -> Path:
    """Return where the file or directory ``path`` is written before it is whole. Local."""
    return path.with_name(f".{path.name}.partial-distprune")


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise an OSError if the disk of ``folder`` has no room for so many bytes. Local."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise OSError(f"{folder} has {free:,} bytes free, and {num_bytes:,} are to be written there")


def write_whole(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write ``content`` into the file ``path`` of a folder of ours, whole or not at all. Local; for one rank.

    ``sync``: wait for the disk.

    Raises:
        OSError: the disk is full or not writable.
    """
    beside = partial_of(path)
    beside.unlink(missing_ok=True)  # what a killed job has left, or a link
    beside.write_bytes(content)
    if sync:
        sync_file(beside)
    beside.replace(path)
