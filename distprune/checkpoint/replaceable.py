"""What an output may replace: an empty directory, a model directory that holds a model's files alone, or a file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from distprune.checkpoint.disk import check_room
from distprune.checkpoint.hf_directory import CONFIG_NAME, INDEX_NAME, read_index

Inputs: TypeAlias = Sequence[str | Path]

_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_SMALL = re.compile(
    r"((generation_|tokenizer_|preprocessor_|processor_)?config|tokenizer|special_tokens_map|added_tokens|vocab"
    r"|chat_template|report)\.json|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
    r"|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja|\d+_[A-Za-z]+/config\.json|README\.md|LICENSE(\.txt|\.md)?|NOTICE|USE_POLICY\.md|\.gitattributes|report\.png"
)


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
                    f"the output directory {path} exists and is not empty; name another or pass overwrite=True"
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
    if not str(target):
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
