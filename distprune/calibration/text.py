"""Tokens of text files: the first ones of a text, and windows drawn from all over a file. No communication."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

__all__ = ["draw_windows", "open_text", "text_tokens"]

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_CHARACTERS_PER_TOKEN = 16  # more than a token has in nearly any text
_WHOLE = 1 << 23  # bytes of a file that is tokenized whole: seconds


def draw_windows(tokenizer: Any, path: Path, num_windows: int | None, length: int, seed: int) -> torch.Tensor:
    """Return ``num_windows`` windows of ``length`` tokens, in the order of the file: see ``load_samples``. Local."""
    generator = torch.Generator().manual_seed(seed)
    with open_text(path, "calibration file") as file:
        size = path.stat().st_size
        if num_windows is not None and size > max(_WHOLE, 2 * num_windows * length * _CHARACTERS_PER_TOKEN):
            stretch = size // num_windows
            # A window ends within its stretch: it begins in the first half.
            begins = torch.randint(max(stretch // 2, 1), (num_windows,), generator=generator).tolist()
            starts = [i * stretch + begin for i, begin in enumerate(begins)]
            rows = [_window_at(tokenizer, path, file, start, length) for start in starts]
            return torch.tensor(rows, dtype=torch.int64)
        ids = _tokens(tokenizer, path, file)
    there = len(ids) // length
    wanted = there if num_windows is None else num_windows
    if wanted > there or not there:
        raise ValueError(
            f"{path} holds {len(ids)} tokens; {max(wanted, 1)} samples of {length} tokens need "
            f"{max(wanted, 1) * length}: give more text, or ask for at most {there} samples"
        )
    windows = torch.tensor(ids[: there * length], dtype=torch.int64).view(there, length)
    return windows[torch.randperm(there, generator=generator)[:wanted].sort().values]


def _tokens(tokenizer: Any, path: Path, file: TextIO) -> list[int]:
    if path.suffix not in _JSON_LINES:
        ids: list[int] = tokenizer(file.read(), add_special_tokens=False)["input_ids"]
        return ids
    return [token for document in _documents(tokenizer, path, file) for token in document]


def _documents(tokenizer: Any, path: Path, lines: Iterator[str], place: str = "") -> Iterator[list[int]]:
    """Yield the tokens of each line's text, and the end token."""
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}{place} is not JSON: {error}") from error
        text = entry.get("text") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise ValueError(
                f'{path}, line {number}{place} holds no text: an object with "text" is called for, or a string'
            )
        yield tokenizer(text, add_special_tokens=False)["input_ids"] + end


def _window_at(tokenizer: Any, path: Path, file: TextIO, start: int, length: int) -> list[int]:
    """Return ``length`` tokens that begin with the first word, or line, that begins at byte ``start`` or later."""
    file.seek(_boundary(path, start, b"\n" if path.suffix in _JSON_LINES else b" \n\t"))
    if path.suffix not in _JSON_LINES:
        ids = text_tokens(tokenizer, file, length)
    else:
        ids = []
        for document in _documents(tokenizer, path, file, f" after byte {start}"):
            ids += document
            if len(ids) >= length:
                break
    if len(ids) < length:
        raise ValueError(f"{path} holds {len(ids)} tokens from byte {start} on, and a sample has {length}")
    return ids[:length]


def _boundary(path: Path, start: int, marks: bytes) -> int:
    """Return the first place, ``start`` or later, that follows one of ``marks``."""
    if start == 0:
        return 0
    with path.open("rb") as file:
        file.seek(start - 1)
        place = start
        while byte := file.read(1):
            if byte in marks:
                return place
            place += 1
    return place


@contextmanager
def open_text(path: Path, what: str) -> Iterator[TextIO]:
    """Yield the open UTF-8 file ``path``, which errors call ``what``. Local.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the body meets something that is not UTF-8.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no {what} {path}")
    try:
        with path.open(encoding="utf-8") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def text_tokens(tokenizer: Any, file: TextIO, num_tokens: int) -> list[int]:
    """Return the tokens of as much of a text as has ``num_tokens``, or of all of it. Local."""
    text = ""
    ids: list[int] = []
    # Tokens depend on what follows, so a longer piece is tokenized from the beginning.
    while len(ids) <= num_tokens and (more := file.read(max(_CHARACTERS_PER_TOKEN * num_tokens, len(text)))):
        text += more
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
