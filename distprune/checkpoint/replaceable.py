"""What an output may replace: an empty directory, or a model directory that holds a model's files alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from distprune.checkpoint.hf_directory import CONFIG_NAME, INDEX_NAME, WEIGHT_SUFFIX, read_json

Inputs: TypeAlias = Sequence[str | Path]

_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_SMALL = re.compile(
    r"((generation_|tokenizer_|preprocessor_|processor_)?config|tokenizer|special_tokens_map|added_tokens|vocab"
    r"|chat_template|report)\.json|journal\.jsonl|(vocab|merges)\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
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
    if not str(target):
        raise ValueError("the output has no name; is the variable that should hold it empty?")
    if Path(target).is_symlink():
        raise ValueError(f"the output {target} is a link to {os.readlink(target)}; name the directory itself")
    # Links above it are followed: what is beside the target must be beside the directory itself.
    path = Path(os.path.realpath(target))
    nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        raise NotADirectoryError(f"the output {path} cannot be made: {nearest} is a file")
    for given in inputs:
        if lies_in(path, given) or any(_holds(path, theirs) for theirs in _places(given)):
            raise ValueError(f"the output {path} and the input {given} lie inside each other; write elsewhere")
    if path.is_dir():
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
    if nearest not in (path, path.parent, path.parent.parent):
        raise FileNotFoundError(f"the output {path} cannot be made: there is no directory {path.parent.parent}")
    parent = path.parent if nearest == path else nearest
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"the output {path} cannot be made: {parent} is not writable")
    return path


def lies_in(path: Path, given: str | Path) -> bool:
    """Return whether ``path`` is what was ``given`` to be read, or lies in it. Local."""
    return any(_holds(place, path) for place in _places(given))


def holds_model(folder: Path) -> bool:
    """Return whether ``folder`` holds a config and weights. Local."""
    return (folder / CONFIG_NAME).is_file() and any(_WEIGHTS.fullmatch(of.name) for of in folder.glob("*"))


def _places(given: str | Path) -> Iterator[Path]:
    """Yield where an input lies, and where the links in an input directory lead."""
    path = Path(os.path.realpath(given))
    yield path
    if path.is_dir():
        yield from (Path(os.path.realpath(entry)) for entry in path.iterdir() if entry.is_symlink())


def _holds(path: Path, other: Path) -> bool:
    return any(_same(path, place) for place in (other, *other.parents))


def _same(one: Path, other: Path) -> bool:
    # Not by name: one directory may be mounted in two places.
    return one.exists() and other.exists() and one.samefile(other)


def _check_replaceable(path: Path, inputs: Inputs) -> None:
    """Raise a ValueError unless ``path`` is a model directory that holds a model's files and copies of inputs alone."""
    try:
        listed = set(read_json(path / INDEX_NAME)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = set()
    foreign, has_weights = [], False
    for entry in sorted(path.rglob("*")):
        name, is_file = entry.relative_to(path).as_posix(), entry.is_file() and not entry.is_symlink()
        is_weights = bool(_WEIGHTS.fullmatch(name)) or (name in listed and name.endswith(WEIGHT_SUFFIX))
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
