"""Tokens of text files: the first ones of a text, and windows drawn from all over a file. No communication."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import torch

_ENCODING = "utf-8-sig"  # a byte order mark before the text is left out
_CHARACTERS_PER_TOKEN = 16  # more than a token has in nearly any text
_LONGEST_NAME = 255  # characters
_WHOLE = 1 << 23  # bytes of a file that is tokenized whole: seconds
_LONGEST_LINE = 1 << 26  # bytes of a JSON line that is drawn from by position: it is read whole
_LONGEST_WORD = 64  # bytes; a longer one, or text without spaces, is cut
_PIECE = 1 << 16  # bytes that are looked through at a time for where a line begins
_TRIES = 100  # to find a window that is not drawn yet


class TextFile:
    """A file of text or JSON lines that is tokenized once, however often windows are drawn from it."""

    def __init__(self, tokenizer: Any, path: Path) -> None:
        self._tokenizer, self._path = tokenizer, path
        self._ids: list[int] | None = None  # of all of it

    def draw(self, num_windows: int | None, length: int, seed: int) -> torch.Tensor:
        """Return ``num_windows`` windows of ``length`` tokens, in the order of the file. Local.

        See ``calibration_windows``.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it is not what it should be, or too small.
        """
        generator, first = generator_of(seed), first_token(self._tokenizer, length)
        length -= len(first)
        with open_text(self._path, "calibration file") as file:
            if num_windows is not None and is_drawn_by_place(self._path, num_windows, length):
                drawn = _draw_by_place(self._tokenizer, self._path, file, num_windows, length, generator)
                return behind(first, drawn)
            if self._ids is None:
                self._ids = tokens_of(self._tokenizer, self._path, file)
        return behind(first, _cut(self._ids, str(self._path), num_windows, length, generator))


def draw_windows_of_text(tokenizer: Any, text: str, num_windows: int | None, length: int, seed: int) -> torch.Tensor:
    """Return windows of a ``text`` in memory, as :class:`TextFile` does of a file. Local."""
    ids = ids_of(tokenizer, text)
    is_name = len(text) <= _LONGEST_NAME and "\n" not in text  # mistyped, perhaps
    source = f"the text {text!r} (there is no file of that name)" if is_name else "the text"
    first = first_token(tokenizer, length)
    return behind(first, _cut(ids, source, num_windows, length - len(first), generator_of(seed)))


def first_token(tokenizer: Any, length: int = 2) -> list[int]:
    """Return the beginning-of-sequence token, alone, if the tokenizer begins texts with it; else nothing. Local.

    Then each window does, of two tokens or more: without it some models, such as Gemma, predict next to nothing.
    """
    token = getattr(tokenizer, "bos_token_id", None)
    return [token] if token is not None and length > 1 and tokenizer("a")["input_ids"][:1] == [token] else []


def behind(first: list[int], windows: torch.Tensor) -> torch.Tensor:
    """Return ``windows`` (n, length), each behind what :func:`first_token` returned. Local."""
    return torch.nn.functional.pad(windows, (1, 0), value=first[0]) if first else windows


def generator_of(seed: int) -> torch.Generator:
    """Return torch's generator on the CPU, of a ``seed`` that a user gave. Local.

    Raises:
        TypeError, ValueError: it is no int, or has more than 64 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, not {seed!r}")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"{seed=} has more than the 64 bits that torch draws by")
    return torch.Generator("cpu").manual_seed(seed)


def _cut(ids: list[int], source: str, num_windows: int | None, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``num_windows`` of the windows without gaps of ``ids``, in their order; ``None``: all of them."""
    there = len(ids) // length
    wanted = there if num_windows is None else num_windows
    if wanted > there or not there:
        fewer = f"at most {there} samples" if there else "shorter ones"
        raise ValueError(
            f"{source} holds {len(ids)} tokens; {max(wanted, 1)} samples of {length} tokens need "
            f"{max(wanted, 1) * length}: give more text, or ask for {fewer}"
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
    if not _is_json_lines(path):
        return _tokens(tokenizer, file, num_tokens)
    ids: list[int] = []
    for text in _documents(path, file, place):
        ids += _tokens(tokenizer, StringIO(text), None if num_tokens is None else num_tokens - len(ids))
        ids += _end(tokenizer)
        if num_tokens is not None and len(ids) >= num_tokens:
            break
    return ids


def _is_json_lines(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".ndjson", ".json")


def _tokens(tokenizer: Any, file: TextIO, num_tokens: int | None) -> list[int]:
    """Return the tokens of a text: all of them, or ``num_tokens`` and some more, if it has that many."""
    if num_tokens is None:
        return ids_of(tokenizer, file.read())
    ids: list[int] = []
    text = ""
    # Tokens depend on what follows, so a longer piece is tokenized from the beginning.
    while len(ids) <= num_tokens and (more := file.read(max(_CHARACTERS_PER_TOKEN * num_tokens, len(text)))):
        text += more
        ids = ids_of(tokenizer, text)
    return ids


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of ``text``; a lone surrogate, half of a character that was cut, is read as "?". Local."""
    return list(tokenizer(text.encode(errors="replace").decode(), add_special_tokens=False)["input_ids"])


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def _documents(path: Path, lines: Iterable[str], place: str = "") -> Iterator[str]:
    """Yield the text of each line that is not blank."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number}{place} is not JSON, one object or string a line: {error}"
            ) from error
        text = entry.get("text") if isinstance(entry, dict) else entry
        if not isinstance(text, str):
            raise ValueError(
                f'{path}, line {number}{place} holds no text: an object with "text" is called for, or a string'
            )
        yield text


def _draw_by_place(
    tokenizer: Any, path: Path, file: TextIO, num_windows: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Return windows that begin at random bytes, one from each of ``num_windows`` stretches of equal length.

    Where there is no window, or one that is there already, another byte of the whole file is drawn.
    """
    size, windows = path.stat().st_size, _PlacedWindows(tokenizer, path, file, length)
    stretch = size // num_windows

    def draw(num_bytes: int) -> int:
        return int(torch.randint(max(num_bytes, 1), (), generator=generator, device="cpu"))

    for i in range(num_windows):
        position = i * stretch + draw(stretch // 2)  # a window ends within its stretch: it begins in the first half
        for _ in range(_TRIES):
            if windows.add(position):
                break
            position = draw(size)
        else:
            raise ValueError(
                f"{path} holds too little text for {num_windows} windows of {length} tokens: after {i} of them, "
                f"{_TRIES} places all over the file gave no other; give more text, or ask for fewer"
            )
    rows = [ids for _, ids in sorted(windows.drawn.items())]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


class _PlacedWindows:
    """Windows of ``length`` tokens of an open file, by where they begin: (byte of the file, byte of a JSON text)."""

    def __init__(self, tokenizer: Any, path: Path, file: TextIO, length: int) -> None:
        self._tokenizer, self._path, self._file, self._length = tokenizer, path, file, length
        self.drawn: dict[tuple[int, int], list[int]] = {}

    def add(self, position: int) -> bool:
        """Add the window that begins with the word at byte ``position``; False: there is none, or it is there already.

        In JSON lines ``position`` chooses a document and, in proportion, a place of its text; documents that follow
        fill the window up.

        Raises:
            ValueError: the document is longer than 64 MiB, or what it should not be.
        """
        if _is_json_lines(self._path):
            begin, next_byte, text = self._document_at(position)
            if text is None:
                return False
            start = _word_begin(text, len(text) * (position - begin) // (next_byte - begin))
            place = (begin, start)
            ids = _tokens(self._tokenizer, StringIO(text[start:].decode()), self._length) + _end(self._tokenizer)
        else:
            place = (self._word_at(position), 0)
            ids, next_byte = [], place[0]
        if len(ids) < self._length:
            self._file.seek(next_byte)
            num_more = self._length - len(ids)
            ids += tokens_of(self._tokenizer, self._path, self._file, num_more, f" from byte {next_byte} on")
        if len(ids) < self._length or place in self.drawn:
            return False
        self.drawn[place] = ids[: self._length]
        return True

    def _word_at(self, position: int) -> int:
        """Return the byte of the file at which the word begins that is at byte ``position``."""
        low = max(position - _LONGEST_WORD - 1, 0)
        with self._path.open("rb") as file:
            file.seek(low)
            return low + _word_begin(file.read(position - low + 1), position - low)

    def _document_at(self, position: int) -> tuple[int, int, bytes | None]:
        """Return the bytes [begin, end) of the JSON line that holds byte ``position``, and its text, if it has one."""
        with self._path.open("rb") as file:
            begin = position
            while begin > max(position - _LONGEST_LINE, 0):
                low = max(begin - _PIECE, 0)
                file.seek(low)
                line_feed = file.read(begin - low).rfind(b"\n")
                begin = low + line_feed + 1
                if line_feed >= 0:
                    break
            file.seek(begin)
            line = file.readline(_LONGEST_LINE + 1)
        if len(line) > _LONGEST_LINE:
            raise ValueError(
                f"{self._path}: the line that holds byte {position} is longer than {_LONGEST_LINE} bytes; "
                "split the document"
            )
        decoded = line.decode(_ENCODING if begin == 0 else "utf-8")
        text = next(_documents(self._path, [decoded], f" from byte {begin} on"), None)
        return begin, begin + len(line), None if text is None else text.encode(errors="replace")


def _word_begin(text: bytes, place: int) -> int:
    """Return where the word at byte ``place`` of UTF-8 ``text`` begins, or the word before that space.

    A word of more than 64 bytes is cut: then it is where the character begins.
    """
    low = max(place - _LONGEST_WORD, 0)
    word = re.search(rb"\S+\s*\Z", text[low : place + 1])
    if word and (low == 0 or word.start()):
        return low + word.start()
    while place and text[place] & 0b11000000 == 0b10000000:  # UTF-8: bytes 10xxxxxx go on with a character
        place -= 1
    return place


def tokenize_file(tokenizer: Any, path: str | Path, *, max_tokens: int, sequence_length: int) -> torch.Tensor:
    """Return the first ``max_tokens`` token ids (1-D int64) of a file: text or JSON lines, as ``calibration_windows``.

    Where the tokenizer begins texts with a token, so does each window, which are all that is returned then. Local.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not what it should be, or holds less than one window of ``sequence_length`` tokens.
    """
    with open_text(Path(path), "text file") as file:
        ids = tokens_of(tokenizer, Path(path), file, max_tokens)[:max_tokens]
    if len(ids) < sequence_length:
        raise ValueError(
            f"{path} holds {len(ids)} tokens; an evaluation needs at least one window of {sequence_length}"
        )
    line, first = torch.tensor(ids, dtype=torch.int64, device="cpu"), first_token(tokenizer, sequence_length)
    if not first:
        return line
    length = sequence_length - 1
    return behind(first, line[: len(line) // length * length].view(-1, length)).flatten()


@contextmanager
def open_text(path: Path, what: str) -> Iterator[TextIO]:
    """Yield the open UTF-8 file ``path``, which errors call ``what``, behind its byte order mark. Local.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the body meets something that is not UTF-8.
    """
    if not os.path.isfile(path):  # a text may be too long for a name
        is_folder = ", which is a directory" if os.path.isdir(path) else ""
        raise FileNotFoundError(f"there is no {what} {path}{is_folder}")
    try:
        with path.open(encoding=_ENCODING) as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
