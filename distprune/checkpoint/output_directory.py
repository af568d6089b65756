"""Where a job writes: beside the target, put in its place when everything is there.

A directory of the target's name exists only as a whole model. What a job that was killed leaves behind is
a hidden sibling, which no loader takes for a model and the next job to the same target removes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from distprune.checkpoint.disk import partial_of, sync_file
from distprune.checkpoint.hf_directory import WEIGHT_SUFFIX
from distprune.checkpoint.output_lock import locking, remove_tree
from distprune.checkpoint.replaceable import Inputs, check_output
from distprune.collectives.agree import agree, together
from distprune.collectives.base import Communicator, as_told, cannot_meet
from distprune.collectives.communicator import Group, communicator
from distprune.collectives.slow import work_together


@contextmanager
def writing(target: str | Path, group: Group = None, *, overwrite: bool = False, inputs: Inputs = ()) -> Iterator[Path]:
    """Yield an empty directory beside ``target``; put it in its place when the body ends on every rank.

    Every rank of ``group`` must enter it. The body may communicate. If it raises, on all ranks or on one
    that no other is waiting for in the body, all raise, what was written is removed, and ``target`` is
    as it was.

    Communicates a name once (two rounds), five rounds of 64 bytes and what :func:`publish` does.

    Raises:
        OSError, ValueError: on every rank: what :func:`check_output` raises, another job writes there,
            writing fails, or ranks were given different arguments.
        FileExistsError: on every rank: another job has filled ``target`` meanwhile and ``overwrite`` is off.
    """
    comm = communicator(group)
    with together(comm, output=str(target), overwrite=overwrite):
        path = check_output(target, overwrite=overwrite, inputs=inputs)

    def make(staging: Path) -> None:
        check_output(path, overwrite=overwrite, inputs=inputs)  # what a killed job replaced is back
        staging.mkdir()

    with locking(comm, path):
        staging = make_staging(comm, path, make)
        with ending_together(comm):
            yield staging
        publish(comm, staging, path, overwrite=overwrite, inputs=inputs)


def make_staging(comm: Communicator, path: Path, make: Callable[[Path], object] = Path.mkdir) -> Path:
    """Let the first rank ``make`` what is written beside ``path``; it is removed when the lock of ``path`` is let go.

    Every rank must call it, and the first must hold the lock: a name (two rounds) and two rounds of 64 bytes.

    Raises:
        OSError: on every rank: it cannot be made, or a rank does not see it.
    """
    staging = partial_of(path, comm.broadcast(secrets.token_hex(4)))
    with together(comm):
        if comm.rank == 0:
            make(staging)
    with together(comm):
        check_shared(staging)
    return staging


@contextmanager
def ending_together(comm: Communicator) -> Iterator[None]:
    """Raise on all ranks what the body raises, which may communicate, on one that no other waits for: 64 bytes."""
    failed: Exception | None = None
    try:
        yield
    except BaseException as error:
        failed = as_told(error)
        if cannot_meet(failed):
            raise
    agree(comm, {}, failed)


def check_shared(path: Path) -> None:
    """Raise a FileNotFoundError if this rank does not see what the first one has made. Local."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is not visible here; the output must be on storage all ranks share")


def publish(
    comm: Communicator, staging: Path, path: Path, *, overwrite: bool, inputs: Inputs = (), sync_files: bool = True
) -> None:
    """Put the finished directory ``staging`` in the place of ``path``, whose files are removed if ``overwrite``.

    Every rank must call it, and the first must hold the lock. It syncs what it has written, all but the weights, which
    those that have written them must have synced. Rounds as :func:`work_together`, twice, and one of 64 bytes. At any
    moment, killed or not, one of the two directories stands under ``path``'s name, or the next job that takes the lock
    puts the old one back. Without ``sync_files`` that does not hold when the system fails.

    Raises:
        FileExistsError: on every rank: ``path`` was filled meanwhile, and ``overwrite`` is off.
        OSError, ValueError: on every rank: as :func:`check_output` raises, or the disk does.
    """
    old = path.parent / f".{path.name}.replaced-{secrets.token_hex(4)}"

    def sync() -> None:
        if comm.rank == 0 and sync_files:
            for entry in [*sorted(staging.rglob("*")), staging]:
                if entry.suffix != WEIGHT_SUFFIX:
                    sync_file(entry)

    def clear() -> None:
        if comm.rank == 0:
            if sync_files:
                sync_file(path.parent)
            remove_tree(old)

    work_together(comm, sync)
    with together(comm):
        if comm.rank == 0:
            try:
                check_output(path, overwrite=overwrite, inputs=inputs)
            except FileExistsError as error:
                raise FileExistsError(f"the output {path} has been filled by someone else meanwhile") from error
            if path.exists():
                path.rename(old)  # whoever holds the lock puts it back if that is as far as this gets
            staging.rename(path)
    work_together(comm, clear)
