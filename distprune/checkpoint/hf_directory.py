"""A Hugging Face model directory: which tensors it holds, in which file, at which bytes.

Nouns: a *weight file* is a ``.safetensors`` file; the *index* maps tensor names to weight files where
there are several; *small files* are everything else that makes the directory a model (config,
generation config, tokenizer, templates) and is carried along as it is, with its *sub-folders*: those that hold weights,
which are another model or another form of it, are left out, and so are hidden and large ones.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.optional_packages import import_extra
from distprune.checkpoint.weight_file import WEIGHT_SUFFIX, TensorEntry, WeightFile, read_weight_file
from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"

_WEIGHT_SUFFIXES = (WEIGHT_SUFFIX, ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_NOT_CARRIED = frozenset({INDEX_NAME, "pytorch_model.bin.index.json", "report.json", "report.png"})
_MAX_SMALL_FILE = 256 << 20  # bytes; nothing a tokenizer or a config comes near
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of every weight file
_READ_BYTES = 8 << 20  # of a file, at a time


@dataclass(frozen=True)
class HfDirectory:
    """What :func:`open_directory` found."""

    path: Path
    weight_files: tuple[WeightFile, ...]
    index_metadata: dict[str, Any]
    small_files: tuple[Path, ...]
    stamps: dict[str, list[int]]  # of every weight file its size, the time of its last change and its inode

    @cached_property
    def tensors(self) -> dict[str, tuple[WeightFile, TensorEntry]]:
        """Every tensor by name."""
        return {entry.name: (file, entry) for file in self.weight_files for entry in file.tensors}

    def check_unchanged(self) -> None:
        """Raise an OSError if a weight file is another one than was opened, or was changed since. Local."""
        for name, stamp in self.stamps.items():
            path = self.path / name
            if not path.is_file() or _stamp(path) != stamp:
                raise OSError(f"{path} was changed or replaced while it was read: start again when it stays as it is")

    def fingerprint(self) -> str:
        """Return a digest of the config and of all tensors' names, places, shapes and dtypes (not their values)."""
        digest = new_digest((self.path / CONFIG_NAME).read_bytes())
        for file in self.weight_files:
            digest.update(f"\n{file.path.name}:{file.tensors}".encode())
        return str(digest.hexdigest())


def new_digest(content: bytes = b"") -> Any:
    """Return a digest (xxh3, 128 bits) to ``update`` with bytes; how they are cut is no matter. Local.

    It tells files apart, and finds damage, at the speed of memory. It does not protect against an attacker.

    Raises:
        ImportError: the extra ``hf`` is not installed.
    """
    return import_extra("xxhash", "hf").xxh3_128(content)


def open_together(comm: Communicator, path: str | Path) -> HfDirectory:
    """Return what :func:`open_directory` returns, on every rank, which each opens it: nodes may have copies.

    Every rank must call it: a round of 64 bytes.

    Raises:
        Exception: on every rank: what ``open_directory`` raises.
        ValueError: on every rank: ranks see other configs, weight files or tensors.
    """
    with together(comm) as facts:
        directory = open_directory(path)
        facts |= {"weight files": [*directory.stamps], "model files": directory.fingerprint()}
    return directory


def sample_together(comm: Communicator, directory: HfDirectory) -> str:
    """Return a digest of bytes from all over the weight files, 256 KiB of each: it tells models of one shape apart.

    The same for any number of ranks. Every rank must call it, and reads them: a round of 64 bytes.

    Raises:
        OSError: on every rank: a file cannot be read.
        ValueError: on every rank: ranks see other weights.
    """
    with together(comm) as facts:
        digest = new_digest()
        for file in directory.weight_files:
            last = max(file.path.stat().st_size - _SAMPLE_BYTES, 0)
            with file.path.open("rb", buffering=0) as handle:
                for place in range(_NUM_SAMPLES):
                    handle.seek(last * place // (_NUM_SAMPLES - 1))
                    digest.update(handle.read(_SAMPLE_BYTES))
        sample = str(digest.hexdigest())
        facts |= {"model files": directory.fingerprint(), "weights (256 KiB of each file)": sample}
    return sample


def file_digest(comm: Communicator, path: Path) -> str:
    """Return a digest of the file ``path``, of which every rank reads its share. Every rank: one round of 24 bytes.

    The same for any number of ranks.

    Raises:
        OSError: on every rank: it cannot be read.
    """

    def add_share(words: torch.Tensor) -> None:
        with path.open("rb") as file:
            for number in range(comm.rank, -(-path.stat().st_size // _READ_BYTES), comm.size):
                file.seek(number * _READ_BYTES)
                digest = new_digest(f"{number}:".encode() + file.read(_READ_BYTES)).digest()
                words += torch.frombuffer(bytearray(digest), dtype=torch.int64)  # sums wrap around

    return sum_together(comm, (2,), add_share).numpy().tobytes().hex()


def open_directory(path: str | Path) -> HfDirectory:
    """Return what the model directory at ``path`` holds. Reads headers only; local, nothing is communicated.

    Raises:
        FileNotFoundError: no such directory, no config, no weights, or a weight file of the index is absent.
        NotADirectoryError: ``path`` is a file.
        ValueError: a weight file is truncated or corrupt, or the index is, names a file outside the
            directory, or a tensor that its file does not hold; a tensor stands in two weight files; a
            small file is a link that leads out of the directory (but into the hub's cache, if it lies there).
        ImportError: the extra ``hf`` is not installed.
    """
    folder = Path(os.path.expanduser(path))
    if not folder.exists():
        raise FileNotFoundError(f"there is no model directory {folder}")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a directory; name the directory that holds config.json")
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"{folder} is no model directory: it has no {CONFIG_NAME}")
    has_index, has_single = ((folder / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))
    if not has_index and not has_single:
        raise FileNotFoundError(
            f"{folder} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there; a pytorch_model.bin may run "
            "code and is neither fetched nor read: save it anew by save_pretrained of transformers"
        )
    weight_map, metadata = read_index(folder / INDEX_NAME) if has_index else ({}, {})
    names = dict.fromkeys(weight_map.values()) if has_index else [SINGLE_NAME]
    if has_single and SINGLE_NAME not in names:
        raise ValueError(f"{folder} holds two models, {SINGLE_NAME} and that of {INDEX_NAME}; remove one")
    stamps = {name: _stamp(folder / name) for name in names}  # before anything is read
    files = tuple(read_weight_file(folder / name) for name in names)
    if has_index:
        _check_index(weight_map, files)
    return HfDirectory(folder, files, metadata, _small_files(folder), stamps)


def _stamp(path: Path) -> list[int]:
    if not path.is_file():
        raise FileNotFoundError(f"the index of {path.parent} names the weight file {path.name!r}, which is not there")
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds. Local.

    Raises:
        ValueError: it holds none.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt: it holds no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is corrupt: it holds no JSON object")
    return value


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return which weight file every tensor is in, and the metadata, of the index ``path``. Local.

    Raises:
        ValueError: it is no index, or names what is no safetensors file beside it.
    """
    index = read_json(path)
    weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
    is_map = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not weight_map or not is_map or not isinstance(metadata, dict):
        raise ValueError(f"{path} is corrupt: it is no index of weight files")
    for tensor, name in weight_map.items():
        # A name, not a path: an index from elsewhere must not make us read, or write beside, other files.
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{path} puts tensor {tensor!r} into {name!r}, which lies outside the model directory")
        if not name.endswith(WEIGHT_SUFFIX):
            raise ValueError(f"{path} puts tensor {tensor!r} into {name!r}, which is no safetensors file")
    return weight_map, metadata


def _check_index(weight_map: dict[str, str], files: tuple[WeightFile, ...]) -> None:
    held = {(entry.name, file.path.name) for file in files for entry in file.tensors}
    for tensor, name in sorted(weight_map.items() - held):
        raise ValueError(f"the index puts tensor {tensor!r} into {name!r}, which does not hold it")
    for tensor, name in sorted(held - weight_map.items()):
        listed = weight_map.get(tensor, "no file")
        raise ValueError(f"tensor {tensor!r} is in {name!r}, and the index puts it into {listed}")


def _small_files(folder: Path) -> tuple[Path, ...]:
    """Return the small files of ``folder`` and its sub-folders, but of those that are hidden, large or hold weights."""
    small: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        weights = {name for name in names if name.endswith(_WEIGHT_SUFFIXES)}
        files = [Path(parent, name) for name in {*names} - weights - _NOT_CARRIED]
        sizes = {file: file.stat().st_size for file in files if file.is_file()}
        if Path(parent) == folder:
            small += [file for file, size in sizes.items() if size <= _MAX_SMALL_FILE]
        elif weights:
            folders.clear()
        elif sum(sizes.values()) <= _MAX_SMALL_FILE:
            small += sizes
    small.sort()
    home = Path(os.path.realpath(folder))
    # The hub's cache: models--ORG--NAME/snapshots/REVISION/config.json -> ../../blobs/DIGEST
    homes = {home, home.parent.parent / "blobs"} if home.parent.name == "snapshots" else {home}
    for path in small:
        target = Path(os.path.realpath(path))
        if homes.isdisjoint(target.parents):
            raise ValueError(f"{path} is a link out of the model directory, to {target}; put a copy in its place")
    return tuple(small)
