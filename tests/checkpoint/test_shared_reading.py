"""Headers and samples are read once over all ranks, whatever their number; copies on nodes are told apart."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distprune.checkpoint.hf_directory import open_directory
from distprune.checkpoint.shared_reading import open_together, sample_together
from distprune.collectives.communicator import communicator
from tests.worlds import run_threads


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each weight file was opened."""
    found: Counter[Path] = Counter()
    open_file = Path.open

    def counted(self: Path, *arguments: Any, **more: Any) -> Any:
        found[self] += self.suffix == ".safetensors"
        return open_file(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", counted)
    return found


def read(_: int, folders: list[Path]) -> tuple[Any, str, tuple[int, int]]:
    comm = communicator()
    directory = open_together(comm, folders[comm.rank % len(folders)])
    return directory, sample_together(comm, directory), (comm.traffic.num_rounds, comm.traffic.num_bytes)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 9])
def test_once_by_all_ranks(split_model: Path, opened: Counter[Path], num_ranks: int) -> None:
    (_, alone, (num_rounds, num_bytes)), *_ = run_threads(1, read, [split_model])
    opened.clear()
    for directory, sample, traffic in run_threads(num_ranks, read, [split_model]):
        assert directory == open_directory(split_model)
        assert (sample, traffic) == (alone, (num_rounds, num_bytes))
    for_all = num_ranks  # by open_directory here
    num_files = len(directory.weight_files)
    assert num_files > 2
    assert num_rounds == 8
    assert num_bytes <= 8 * 64 + 8 * num_files + 40 * len(directory.tensors)
    assert {path: number - for_all for path, number in opened.items() if number} == {
        file.path: 2 for file in directory.weight_files
    }


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_copies_are_read_by_those_that_see_them(
    split_model: Path, tmp_path: Path, opened: Counter[Path], num_ranks: int
) -> None:
    copies = [shutil.copytree(split_model, tmp_path / name) for name in ("one", "other")]
    found = run_threads(num_ranks, read, copies)
    assert {path: number for path, number in opened.items() if number} == {
        copy / path.name: 2 for copy in copies for path in split_model.glob("*.safetensors")
    }
    assert len({sample for _, sample, _ in found}) == 1
    assert [directory.path for directory, _, _ in found] == [copies[rank % 2] for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("which", [0, 1])
def test_all_ranks_say_which_file_is_corrupt(split_model: Path, tmp_path: Path, num_ranks: int, which: int) -> None:
    folder = shutil.copytree(split_model, tmp_path / "model")
    path = sorted(folder.glob("*.safetensors"))[which]
    os.truncate(path, path.stat().st_size - 1)
    for error in run_threads(num_ranks, read, [folder], catch=True):
        assert isinstance(error, ValueError)
        assert f"{path} is corrupt" in str(error)


def other_header(path: Path) -> None:
    """As many bytes, and another name in them."""
    path.write_bytes(path.read_bytes().replace(b"layers.1", b"layers.7", 1))


def other_weights(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"else")


def other_files(path: Path) -> None:
    index = path.parent / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(path.name, f"{path.name[:-12]}-new.safetensors"))
    path.rename(path.with_name(f"{path.name[:-12]}-new.safetensors"))


@pytest.mark.parametrize(
    ("change", "said"), [(other_header, "headers"), (other_files, "weight files"), (other_weights, "")]
)
def test_copies_that_differ(split_model: Path, tmp_path: Path, change: Any, said: str) -> None:
    copies = [shutil.copytree(split_model, tmp_path / name) for name in ("one", "other")]
    change(next(path for path in sorted(copies[1].glob("*.safetensors")) if b"layers.1" in path.read_bytes()[:4096]))
    found = run_threads(4, read, copies, catch=True)
    if said:
        assert all(isinstance(error, ValueError) for error in found)
        assert all(f"different arguments: {said}: " in str(error) for error in found)
    else:
        samples = [sample for _, sample, _ in found]
        assert samples[:2] == samples[2:]
        assert samples[0] != samples[1]
