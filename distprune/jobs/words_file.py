"""A file of windows that a model has written: safetensors, with what they were written with in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from distprune.checkpoint.digest import new_digest
from distprune.checkpoint.disk import write_whole
from distprune.checkpoint.optional_packages import import_extra
from distprune.version import __version__

_TOKENS = "token_ids"
_FORMAT = {"format": "distprune own words"}


def about_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Return what the metadata says of the tokenizer: token ids mean something only to the same. Local."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return {"tokenizer": str(new_digest(vocabulary.encode()).hexdigest())}


def write_words(path: Path, token_ids: torch.Tensor, about: Mapping[str, object], *, sync: bool = True) -> None:
    """Write :func:`words_content` into the file ``path``, as :func:`write_whole` does. Local; for one rank.

    Raises:
        OSError: the disk is full or not writable.
    """
    write_whole(path, words_content(token_ids, about), sync=sync)


def words_content(token_ids: torch.Tensor, about: Mapping[str, object]) -> bytes:
    """Return what a file of ``token_ids`` (windows, tokens) holds; ``about`` goes into its metadata, with versions."""
    save = import_extra("safetensors.torch", "hf").save
    versions = {"distprune": str(__version__), **{name: version(name) for name in ("torch", "transformers")}}
    metadata = {**_FORMAT, **{key: str(value) for key, value in about.items()}, **versions}
    content: bytes = save({_TOKENS: token_ids.to(torch.int32).contiguous()}, metadata)
    return content


def read_words(path: Path) -> tuple[torch.Tensor, dict[str, str]]:
    """Return the windows in the file ``path``, int64, and its metadata. Nothing is unpickled. Local.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not of :func:`write_words`, or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of own words {path}")
    safetensors = import_extra("safetensors", "hf")
    path.open("rb").close()  # the library calls any file that it cannot open missing
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata, names = dict(file.metadata() or {}), list(file.keys())
            token_ids = file.get_tensor(_TOKENS) if names == [_TOKENS] else None
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no file of own words, or damaged: {error}") from error
    if token_ids is None or not metadata.items() >= _FORMAT.items():
        raise ValueError(f"{path} holds no windows of `distprune sample`")
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.ndim != 2 or not token_ids.numel():
        raise ValueError(f"{path} holds {token_ids.dtype} {tuple(token_ids.shape)}, not token ids by window")
    return token_ids.to(torch.int64), metadata
