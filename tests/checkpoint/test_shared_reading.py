"""All ranks see one checkpoint, or copies of it; what differs is refused on all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from distprune.checkpoint import hf_directory
from distprune.checkpoint.hf_directory import file_digest, open_directory, open_together, sample_together
from distprune.collectives.communicator import communicator
from tests.worlds import all_raise, run_threads


def read(_: int, folders: list[Path]) -> tuple[Any, str, tuple[int, int]]:
    comm = communicator()
    directory = open_together(comm, folders[comm.rank % len(folders)])
    return directory, sample_together(comm, directory), (comm.traffic.num_rounds, comm.traffic.num_bytes)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_copies_are_one_checkpoint(split_model: Path, tmp_path: Path, num_ranks: int) -> None:
    copies = [shutil.copytree(split_model, tmp_path / name) for name in ("one", "other")]
    alone = run_threads(1, read, [split_model])[0][1]
    for rank, (directory, sample, traffic) in enumerate(run_threads(num_ranks, read, copies)):
        assert directory == open_directory(copies[rank % 2])
        assert (sample, traffic) == (alone, (2, 2 * 64))


def other_header(path: Path) -> None:
    """As many bytes, and another order of dims in them."""
    path.write_bytes(path.read_bytes().replace(b"[28,20]", b"[20,28]", 1))


def other_weights(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"else")


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def not_fetched(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


def other_files(path: Path) -> None:
    index = path.parent / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(path.name, f"{path.name[:-12]}-new.safetensors"))
    path.rename(path.with_name(f"{path.name[:-12]}-new.safetensors"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_header, "model files"),
        (other_files, "weight files"),
        (other_weights, r"weights \(256 "),
        (cut_off, ".safetensors is corrupt or truncated"),
        (not_fetched, ".safetensors is a pointer of Git LFS: git lfs pull fetches the file"),
    ],
)
def test_copies_that_differ(split_model: Path, tmp_path: Path, change: Any, said: str) -> None:
    copies = [shutil.copytree(split_model, tmp_path / name) for name in ("one", "other")]
    before = [path.read_bytes() for path in sorted(copies[1].iterdir())]
    change(next(path for path in sorted(copies[1].glob("*.safetensors")) if b"[28,20]" in path.read_bytes()[:4096]))
    assert before != [path.read_bytes() for path in sorted(copies[1].iterdir())]
    all_raise(4, read, copies, kind=ValueError, match=said)


def digest(_: int, path: Path) -> str:
    return file_digest(communicator(), path)


def test_a_digest_tells_one_bit_and_the_order_of_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same from any number of ranks."""
    monkeypatch.setattr(hf_directory, "_READ_BYTES", 4)
    path, contents = tmp_path / "file", [b"abcdefghij", b"efghabcdij", b"abcdefghik", b"abcdefghi", b""]
    digests: list[str] = []
    for content in contents:
        path.write_bytes(content)
        of_ranks = {found for num in (1, 2, 5) for found in run_threads(num, digest, path)}
        assert len(of_ranks) == 1
        digests += of_ranks
    assert len({*digests}) == len(contents)
