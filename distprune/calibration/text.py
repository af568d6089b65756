"""Tokens of text files: the first ones of a text, and windows drawn from all over a file. No communication."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_CHARACTERS_PER_TOKEN = 16  # more than a token has in nearly any text
_LONGEST_NAME = 255  # characters
_WHOLE = 1 << 23  # bytes of a file that is tokenized whole: seconds
_PIECE = 1 << 16  # bytes that are looked through at a time for where a word or a line begins; more than a word has


def draw_windows(tokenizer: Any, path: Path, num_windows: int | None, length: int, seed: int) -> torch.Tensor:
    """Return ``num_windows`` windows of ``length`` tokens, in the order of the file: see ``load_samples``. Local."""
    generator = torch.Generator().manual_seed(seed)
    with open_text(path, "calibration file") as file:
        if num_windows is not None and is_drawn_by_place(path, num_windows, length):
            stretch = path.stat().st_size // num_windows
            # A window ends within its stretch: it begins in the first half.
            begins = torch.randint(max(stretch // 2, 1), (num_windows,), generator=generator, device="cpu").tolist()
            starts = [i * stretch + begin for i, begin in enumerate(begins)]
            rows = [_window_at(tokenizer, path, file, start, length) for start in starts]
            return torch.tensor(rows, dtype=torch.int64, device="cpu")
        return _cut(tokens_of(tokenizer, path, file), str(path), num_windows, length, generator)


def draw_windows_of_text(tokenizer: Any, text: str, num_windows: int | None, length: int, seed: int) -> torch.Tensor:
    """Return windows of a ``text`` in memory, as :func:`draw_windows` does of a file. Local."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    is_name = len(text) <= _LONGEST_NAME and "\n" not in text  # mistyped, perhaps
    source = f"the text {text!r} (there is no file of that name)" if is_name else "the text"
    return _cut(ids, source, num_windows, length, torch.Generator().manual_seed(seed))


def _cut(ids: list[int], source: str, num_windows: int | None, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``num_windows`` of the windows without gaps of ``ids``, in their order; ``None``: all of them."""
    there = len(ids) // length
    wanted = there if num_windows is None else num_windows
    if wanted > there or not there:
        raise ValueError(
            f"{source} holds {len(ids)} tokens; {max(wanted, 1)} samples of {length} tokens need "
            f"{max(wanted, 1) * length}: give more text, or ask for at most {there} samples"
        )
    windows = torch.tensor(ids[: there * length], dtype=torch.int64, device="cpu").view(there, length)
    return windows[torch.randperm(there, generator=generator, device="cpu")[:wanted].sort().values]


def is_drawn_by_place(path: Path, num_windows: int, length: int) -> bool:
    """Return whether the file ``path`` is too large to be tokenized whole for so many windows. Local."""
    return path.stat().st_size > max(_WHOLE, 2 * num_windows * length * _CHARACTERS_PER_TOKEN)


def tokens_of(tokenizer: Any, path: Path, file: TextIO, num_tokens: int | None = None, place: str = "") -> list[int]:
    """Return the tokens of the open ``file``, which is ``path``; after each JSON document the end token. Local.

    With ``num_tokens``: of as much of the file as has that many, or of all of it. ``place`` is for errors.
    """
    ids: list[int] = []
    if path.suffix in _JSON_LINES:
        for document in _documents(tokenizer, path, file, place):
            ids += document
            if num_tokens is not None and len(ids) >= num_tokens:
                break
    elif num_tokens is None:
        ids = tokenizer(file.read(), add_special_tokens=False)["input_ids"]
    else:
        text = ""
        # Tokens depend on what follows, so a longer piece is tokenized from the beginning.
        while len(ids) <= num_tokens and (more := file.read(max(_CHARACTERS_PER_TOKEN * num_tokens, len(text)))):
            text += more
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _documents(tokenizer: Any, path: Path, lines: Iterator[str], place: str = "") -> Iterator[list[int]]:
    """Yield the tokens of each line's text, and the end token."""
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}{place} is not JSON: {error}") from error
        text = entry.get("text") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise ValueError(
                f'{path}, line {number}{place} holds no text: an object with "text" is called for, or a string'
            )
        yield tokenizer(text, add_special_tokens=False)["input_ids"] + end


def _window_at(tokenizer: Any, path: Path, file: TextIO, start: int, length: int) -> list[int]:
    """Return ``length`` tokens that begin with the first word, or line, that begins at byte ``start`` or later."""
    file.seek(_boundary(path, start))
    ids = tokens_of(tokenizer, path, file, length, f" after byte {start}")
    if len(ids) < length:
        raise ValueError(f"{path} holds {len(ids)} tokens from byte {start} on, and a sample has {length}")
    return ids[:length]


def _boundary(path: Path, start: int) -> int:
    """Return the first place, ``start`` or later, where a word begins, or in JSON lines a line.

    In text without a space for 64 KiB: where a character begins.

    Raises:
        ValueError: the JSON line that holds byte ``start`` does not end within 8 MiB.
    """
    if start == 0:
        return 0
    is_lines = path.suffix in _JSON_LINES
    mark = re.compile(rb"\n" if is_lines else rb"[ \n\t]")
    with path.open("rb") as file:
        file.seek(start - 1)
        for place in range(start - 1, start + _WHOLE, _PIECE):
            piece = file.read(_PIECE)
            if found := mark.search(piece):
                return place + found.end()
            if not is_lines:
                begins = re.compile(rb"[^\x80-\xbf]").search(piece, 1)  # UTF-8: bytes 10xxxxxx go on with a character
                return place + (begins.start() if begins else len(piece))
            if len(piece) < _PIECE:
                return place + len(piece)
    raise ValueError(
        f"{path}: the line that holds byte {start} goes on for more than {_WHOLE} bytes; split the document"
    )


def first_tokens(tokenizer: Any, path: Path, num_tokens: int, what: str) -> list[int]:
    """Return the first ``num_tokens`` tokens of a file, which errors call ``what``, or all there are. Local.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not UTF-8, or a line of JSON lines is not what it should be.
    """
    with open_text(path, what) as file:
        return tokens_of(tokenizer, path, file, num_tokens)[:num_tokens]


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
