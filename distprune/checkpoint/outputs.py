"""Where a job writes: beside the target, put in its place when everything is there. And what a target may replace.

A directory or a file of the target's name is whole, or what it was before. What a killed job leaves is a hidden
sibling, which the next job to the same target removes. Nothing is written through a link. An output replaces an empty
directory, a model directory that holds a model's files alone, or a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from distprune.checkpoint.disk import check_room, partial_of, sync_file
from distprune.checkpoint.hf_directory import CONFIG_NAME, INDEX_NAME, read_index
from distprune.checkpoint.output_lock import locking, replaced_of
from distprune.checkpoint.weight_file import WEIGHT_SUFFIX
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Group, communicator
from distprune.collectives.slow import work_together

Inputs: TypeAlias = Sequence[str | Path]

_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_SMALL = re.compile(
    r"((generation_|tokenizer_|preprocessor_|processor_)?config|tokenizer|special_tokens_map|added_tokens|vocab"
    r"|chat_template|report)\.json|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
    r"|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja|\d+_[A-Za-z]+/config\.json|README\.md|LICENSE(\.txt|\.md)?|NOTICE|USE_POLICY\.md|\.gitattributes|report\.png"
)


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


def check_output(target: str | Path, *, overwrite: bool = False, inputs: Inputs = ()) -> Path:
    """Return ``target`` as an absolute path if a model may be written there. Local; changes nothing.

    ``inputs`` are files and directories that the job reads; the output must neither hold one nor lie in one.

    Raises:
        FileExistsError: it exists and is not empty, and ``overwrite`` is off.
        FileNotFoundError: neither its parent nor the directory above that exists: one of them is made, no more.
        NotADirectoryError: it, or something above it, is a file.
        PermissionError: its parent, or the first one that exists, is not writable.
        ValueError: it has no name, is a link, is or holds the home or the current directory or an input, is a
            mount point, lies in an input, or holds anything but a model's files.
    """
    path = _place_of(target, inputs)
    nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise NotADirectoryError(f"the output {path} cannot be made: {nearest} is a file")
    if nearest == path:
        for what, kept in (("home", "~"), ("current", ".")):
            if _holds(path, Path(os.path.realpath(os.path.expanduser(kept)))):
                raise ValueError(f"the output {path} is or holds the {what} directory; name another")
        if any(path.iterdir()):
            if not overwrite:
                raise FileExistsError(
                    f"the output directory {path} exists and is not empty; name another or pass overwrite=True "
                    "(--overwrite)"
                )
            _check_replaceable(path, inputs)
        if os.path.ismount(path):
            raise ValueError(f"the output {path} is a mount point and cannot be replaced; name another")
        nearest = path.parent
    if nearest not in (path.parent, path.parent.parent):
        raise FileNotFoundError(f"the output {path} cannot be made: there is no directory {path.parent.parent}")
    _check_writable(path, nearest)
    return path


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
    path = _place_of(target, inputs)
    folder = path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"the output {path} cannot be made: there is no directory {folder}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; name a file, such as {path / 'output'}")
    for parent in path.parents:
        if (parent / CONFIG_NAME).is_file() and any(_WEIGHTS.fullmatch(file.name) for file in parent.iterdir()):
            raise ValueError(f"the output {path} lies in {parent}, which is a model's directory; write elsewhere")
    if path.exists() and not (overwrite and path.is_file()):
        raise FileExistsError(f"{path} is there; name another output, or pass overwrite=True (--overwrite)")
    _check_writable(path, folder)
    check_room(folder, num_bytes)
    return path


def _place_of(target: str | Path, inputs: Inputs) -> Path:
    """Return ``target`` as an absolute path.

    Raises:
        ValueError: it has no name, is a link, or holds an input or lies in one.
    """
    target = os.path.expanduser(target)
    if not target:
        raise ValueError("the output has no name; is the variable that should hold it empty?")
    if Path(target).is_symlink():
        raise ValueError(f"the output {target} is a link to {os.readlink(target)}; name what it leads to")
    # Links above it are followed: what is beside the target must be beside the file or directory itself.
    path = Path(os.path.realpath(target))
    for given in inputs:
        if any(_holds(path, place) or _holds(place, path) for place in _places(given)):
            raise ValueError(f"the output {path} and the input {given} lie inside each other; write elsewhere")
    return path


def _check_writable(path: Path, folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"the output {path} cannot be made: {folder} is not writable")


def _places(given: str | Path) -> Iterator[Path]:
    """Yield where an input lies, and where the links in an input directory lead."""
    path = Path(os.path.realpath(given))
    yield path
    if path.is_dir():
        yield from (Path(os.path.realpath(entry)) for entry in path.iterdir() if entry.is_symlink())


def _holds(path: Path, other: Path) -> bool:
    # Not by name: one directory may be mounted in two places.
    return path.exists() and any(place.exists() and path.samefile(place) for place in (other, *other.parents))


def _check_replaceable(path: Path, inputs: Inputs) -> None:
    """Raise a ValueError unless ``path`` is a model directory that holds a model's files and copies of inputs alone."""
    listed: set[str] = set()
    with suppress(OSError, ValueError):
        listed.update(read_index(path / INDEX_NAME)[0].values())
    foreign, has_weights = [], False
    for entry in sorted(path.rglob("*")):
        name, is_file = entry.relative_to(path).as_posix(), entry.is_file() and not entry.is_symlink()
        is_weights = bool(_WEIGHTS.fullmatch(name)) or name in listed
        is_known = is_weights or _SMALL.fullmatch(name) or any((Path(given) / name).is_file() for given in inputs)
        is_folder = entry.is_dir() and not entry.is_symlink() and any(entry.iterdir())
        if not is_folder and not (is_file and is_known):
            foreign.append(name)
        has_weights |= is_file and is_weights
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise ValueError(
            f"the output {path} is not replaced: it holds {foreign[:5]}{more}, which are no files of a model; "
            "move them away or name another output"
        )
    if not has_weights or not (path / CONFIG_NAME).is_file():
        raise ValueError(f"the output {path} is not replaced: it is no model directory; name another output")
