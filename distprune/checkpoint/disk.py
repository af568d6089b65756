"""Files that are whole or not there, and waiting for the disk: which rank syncs what all ranks have written.

``fsync`` has the kernel put on the disk what it holds of a file, whichever of its processes wrote it. Of what another
machine's kernel holds, on a file system that they share, it knows nothing. So it is right, and enough, that of the
ranks on one kernel one syncs a file, once all of them have written. Kernels are told apart by their boot, since
machines may have equal names; a folder that one kernel has mounted twice, with pages apart (FUSE), counts as two.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from distprune.collectives import Communicator

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NUM_DIGITS = 16


def kernel_of(folder: Path) -> str:
    """Return what is the same for processes on one kernel, to which ``folder`` is one. Local.

    Where the kernel does not tell its boot (macOS), each process counts as on its own.
    """
    boot = _BOOT.read_text() if _BOOT.exists() else f"{platform.node()} {os.getpid()}"
    return hashlib.sha256(f"{boot} {folder.stat().st_dev}".encode()).hexdigest()[:_NUM_DIGITS]


def share_to_sync(comm: Communicator, kernel: str) -> slice:
    """Return which of a list of files this rank syncs; ``kernel``: of :func:`kernel_of`.

    Every rank must call it: two rounds, 18 bytes a rank.
    """
    return share_of(comm.gather(kernel), comm.rank)


def share_of(said: Sequence[str], rank: int) -> slice:
    """Return which of a list is ``rank``'s, where those that ``said`` the same, by rank, share it out. Local."""
    return slice(said[:rank].count(said[rank]), None, said.count(said[rank]))


def sync_file(path: Path) -> None:
    """Wait until the file or directory ``path`` is on the disk. Local."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_of(path: Path) -> Path:
    """Return where the file ``path`` is written, before it is whole. Local."""
    return path.with_name(f".{path.name}.partial")


def write_whole(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Write ``content`` into the file ``path``, whole or not at all. Local; for one rank. ``sync``: wait for the disk.

    Raises:
        OSError: the disk is full or not writable.
    """
    beside = partial_of(path)
    try:
        beside.write_bytes(content)
        if sync:
            sync_file(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
