"""A digest of a file is the same from any number of ranks, and tells one bit and the order of what it is read in."""

from __future__ import annotations

from pathlib import Path

import pytest

from distprune.checkpoint import digest
from distprune.checkpoint.digest import file_digest
from distprune.collectives.communicator import communicator
from tests.worlds import run_threads


def test_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_READ_BYTES", 4)
    contents = [b"abcdefghij", b"efghabcdij", b"abcdefghik", b"abcdefghi", b""]
    found: list[str] = []
    for content in contents:
        (tmp_path / "file").write_bytes(content)
        own = {found for num in (1, 2, 5) for found in run_threads(num, lambda _: of(tmp_path / "file"))}
        assert len(own) == 1
        found += own
    assert len({*found}) == len(contents)


def of(path: Path) -> str:
    return file_digest(communicator(), path)


def test_how_bytes_are_cut_is_no_matter() -> None:
    cut = digest.new_digest(b"abc")
    cut.update(b"")
    cut.update(b"defg")
    assert cut.digest() == digest.new_digest(b"abcdefg").digest()
    assert digest.as_words(cut).numpy().tobytes() == cut.digest()
