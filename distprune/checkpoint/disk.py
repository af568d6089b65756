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
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from distprune.collectives.base import Communicator

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


def partial_of(path: Path, token: str = "") -> Path:
    """Return where ``path`` is written before it is whole; ``token``: what makes the name new. Local."""
    return path.with_name(f".{path.name}.partial-{token or secrets.token_hex(4)}")


def whole_name(name: str) -> str | None:
    """Return the name of what a killed process has left in part, under a name of :func:`partial_of`. Local."""
    found = re.fullmatch(r"\.(.+)\.partial-[0-9a-f]{8}", name)
    return found and found[1]


def make_file(path: Path) -> None:
    """Make the empty file ``path``, where nothing may be, not even a link. Local.

    Raises:
        OSError: it cannot be made.
    """
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))


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
    make_file(beside)
    try:
        beside.write_bytes(content)
        if sync:
            sync_file(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
