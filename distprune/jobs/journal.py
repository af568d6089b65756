"""What a job has done, in a file that only grows: a job that was killed goes on behind its last item.

Noun: an *item* is something that need not be done again: a figure, a trial, a block or a stretch that every rank has
on the disk, a saved state of a training. It is a line of JSON, behind a checksum of it and of the lines before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

JOURNAL_NAME = "journal.jsonl"
_NUM_DIGITS = 16  # of a checksum


@dataclass(frozen=True)
class Item:
    """``value`` is what JSON carries; ``digest`` tells whether what the item stands for is on the disk."""

    kind: str
    value: Any
    digest: str = ""


class Journal:
    """The :attr:`items` of a job, in the file ``path``, and its :attr:`facts`: those that are there, or these. Local.

    ``writes``: append to the file, not only in memory; ``sync``: wait for the disk then. A last line without its end,
    which a killed job has left, is ignored; the next item takes its place.

    Raises:
        ValueError: another line is not as it was written.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], *, writes: bool = True, sync: bool = True) -> None:
        self.path, self._writes, self.sync = path, writes, sync
        self.asked: dict[str, Any] = json.loads(json.dumps(dict(facts)))
        self.facts = self.asked
        self.items: list[Item] = []
        self._lines: list[bytes] = []
        self._num_written = 0
        if not os.path.lexists(path):
            return
        for text in path.read_bytes().split(b"\n")[:-1]:
            body = text[_NUM_DIGITS + 1 :]
            line = self._line(body)
            if line != text + b"\n":
                raise ValueError(f"{path} is damaged: line {len(self._lines) + 1} is not what was written")
            self._lines.append(line)
            if len(self._lines) == 1:
                self.facts = json.loads(body)
            else:
                self.items.append(Item(**json.loads(body)))
        self._num_written = len(self._lines)

    @property
    def is_begun(self) -> bool:
        """Whether anything is in the file."""
        return self._num_written > 0

    def append(self, item: Item, *, at_once: bool = True) -> None:
        """Note ``item``: in the file ``at_once``, or together with the next that is. Local."""
        for content in [*([] if self._lines else [self.facts]), asdict(item)]:
            self._lines.append(self._line(json.dumps(content).encode()))
        self.items.append(item)
        if at_once:
            self.flush()

    def flush(self) -> None:
        """Write, at once, what is noted and not in the file yet. Local."""
        if self._writes:
            with self.path.open("ab") as file:
                file.truncate(sum(map(len, self._lines[: self._num_written])))
                file.write(b"".join(self._lines[self._num_written :]))
                file.flush()
                if self.sync:
                    os.fsync(file.fileno())
        self._num_written = len(self._lines)

    def forget(self, item: Item) -> None:
        """Take ``item`` and those behind it for not done; in the file the next one takes their place. Local."""
        number = self.items.index(item)
        del self.items[number:], self._lines[number + 1 :]
        self._num_written = min(self._num_written, len(self._lines))

    def _line(self, body: bytes) -> bytes:
        before = self._lines[-1] if self._lines else b""
        return hashlib.sha256(before + body).hexdigest()[:_NUM_DIGITS].encode() + b" " + body + b"\n"
