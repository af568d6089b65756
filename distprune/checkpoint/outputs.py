"""Where a job writes: beside the target, put in its place when everything is there.

A directory or a file of the target's name is whole, or what it was before. What a killed job leaves is a hidden
sibling, which the next job to the same target removes. Nothing is written through a link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from distprune.checkpoint.disk import partial_of, sync_file
from distprune.checkpoint.hf_directory import WEIGHT_SUFFIX
from distprune.checkpoint.output_lock import locking, replaced_of
from distprune.checkpoint.replaceable import Inputs, check_file, check_output
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.collectives.slow import work_together


@contextmanager
def writing(
    target: str | Path, group: Group = None, *, overwrite: bool = False, inputs: Inputs = (), is_file: bool = False
) -> Iterator[Path]:
    """Yield an empty directory, or file, beside ``target``; put it in its place when the body ends on every rank.

    Every rank of ``group`` must enter it, and see ``target``. The body may communicate. If it raises, on all ranks or
    on one that no other is waiting for in the body, all raise, what was written is removed, and ``target`` is as it
    was. What other ranks than the first have written, and weights, must be synced.

    Communicates five rounds of 64 bytes and what :func:`publish` does.

    Raises:
        OSError, ValueError: on every rank: what :func:`check_output`, or :func:`check_file`, raises; another job writes
            there or has filled ``target`` meanwhile, writing fails, or ranks were given different arguments.
    """
    comm = communicator(group)
    check = partial(check_file if is_file else check_output, target, overwrite=overwrite, inputs=inputs)
    with together(comm, output=str(target), overwrite=overwrite):
        path = check()

    staging = partial_of(path)
    with locking(comm, path):
        with together(comm):
            if comm.rank == 0:
                check()  # what a killed job replaced is back
                if is_file:
                    staging.touch(exist_ok=False)
                else:
                    staging.mkdir()
        with together(comm):
            check_shared(staging)
        with together(comm):  # what a rank raises that no other waits for
            yield staging
        publish(comm, staging, path, check)


def check_shared(path: Path) -> None:
    """Raise a FileNotFoundError if this rank does not see what the first one has made. Local."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is not visible here; the output must be on storage all ranks share")


def publish(
    comm: Communicator, staging: Path, path: Path, check: Callable[[], object], *, sync_files: bool = True
) -> None:
    """Put the finished ``staging`` in the place of ``path``, if ``check`` raises nothing now.

    Every rank must call it, and the first must hold the lock, which removes what was replaced when it is let go. It
    syncs what it has written, all but the weights, which those that have written them must have synced. Rounds as
    :func:`work_together`, twice, and one of 64 bytes. At any moment, killed or not, ``path`` is the old or the new one,
    or the next job that takes the lock puts the old directory back. Without ``sync_files`` that does not hold when the
    system fails.

    Raises:
        OSError, ValueError: on every rank: as ``check`` raises, or the disk does.
    """

    def sync() -> None:
        if comm.rank == 0 and sync_files:
            for entry in [*sorted(staging.rglob("*")), staging]:
                if entry.suffix != WEIGHT_SUFFIX:
                    sync_file(entry)

    def sync_names() -> None:
        if comm.rank == 0 and sync_files:
            sync_file(path.parent)

    work_together(comm, sync)
    with together(comm):
        if comm.rank == 0:
            try:
                check()
            except FileExistsError as error:
                raise FileExistsError(f"the output {path} has been filled by someone else meanwhile") from error
            if path.is_dir():
                path.rename(replaced_of(path))
            staging.rename(path)
    work_together(comm, sync_names)
