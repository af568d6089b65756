"""Outputs are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distprune.checkpoint import check_output, output_directory, writing
from distprune.collectives import Communicator
from tests.worlds import run_threads


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_published_when_the_body_ends(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        with writing(tmp_path / "deep" / "out") as staging:
            (staging / f"file{rank}").write_text(str(rank))
            assert not (tmp_path / "deep" / "out").exists()

    run_threads(3, write)
    assert content(tmp_path) == {f"deep/out/file{rank}": str(rank) for rank in range(3)}


def test_an_empty_directory_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with writing(tmp_path / "out") as staging:
        (staging / "new").write_text("new")
    assert content(tmp_path) == {"out/new": "new"}


def test_overwrite_replaces_everything(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with writing(tmp_path / "out", overwrite=True) as staging:
        (staging / "new").write_text("new")
        assert content(tmp_path / "out") == {"old": "old"}
    assert content(tmp_path) == {"out/new": "new"}


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_nothing_changes_when_the_body_fails(tmp_path: Path, failing_rank: int) -> None:
    from distprune.collectives import communicator, together

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")

    def write(rank: int) -> None:
        with writing(tmp_path / "out", overwrite=True) as staging:
            with together(communicator()):
                (staging / f"half{rank}").write_text("half")
                if rank == failing_rank:
                    raise OSError("disk full")

    results = run_threads(2, write, catch=True)
    assert [type(result) for result in results] == [OSError, OSError]
    assert content(tmp_path) == {"out/old": "old"}


def test_not_empty_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(FileExistsError, match="--overwrite"):
        check_output(tmp_path)


def test_a_file_where_the_directory_would_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        check_output(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="is a file"):
        check_output(tmp_path / "file" / "below")


def test_not_writable() -> None:
    """/proc takes no directories, not even from root."""
    with pytest.raises(PermissionError, match="cannot be"):
        with writing("/proc/out"):
            pass


@pytest.mark.parametrize("target", ["model", "model/inside", "."])
def test_inside_or_above_the_model(tmp_path: Path, target: str) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="inside each other"):
        check_output(tmp_path / target, overwrite=True, source=tmp_path / "model")


def test_filled_by_another_job_meanwhile(tmp_path: Path) -> None:
    def write() -> None:
        with writing(tmp_path / "out") as staging:
            (staging / "new").write_text("new")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").write_text("theirs")

    with pytest.raises(FileExistsError, match="meanwhile"):
        write()
    assert content(tmp_path) == {"out/theirs": "theirs"}


def test_link_to_a_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "old").write_text("old")
    (tmp_path / "out").symlink_to(tmp_path / "real")
    with writing(tmp_path / "out", overwrite=True) as staging:
        (staging / "new").write_text("new")
    assert (tmp_path / "out").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real"]
    assert content(tmp_path / "real") == {"new": "new"}


def test_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with pytest.raises(ValueError, match="mount point"):
        check_output(tmp_path / "out")


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_one_rank_fails_outside_of_any_exchange(tmp_path: Path, failing_rank: int) -> None:
    def write(rank: int) -> None:
        with writing(tmp_path / "out"):
            if rank == failing_rank:
                raise OSError("disk full")

    for error in run_threads(2, write, catch=True):
        assert isinstance(error, OSError)
        assert "disk full" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_interrupted(tmp_path: Path) -> None:
    def write() -> None:
        with writing(tmp_path / "out") as staging:
            (staging / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_lost_while_the_directory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def lost(_: Communicator) -> Iterator[None]:
        yield
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(output_directory, "together", lost)
    with pytest.raises(RuntimeError, match="closed by peer"), writing(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_old_directory_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)

    def write() -> None:
        with writing(tmp_path / "out", overwrite=True):
            pass

    with pytest.raises(OSError, match="no"):
        write()
    assert content(tmp_path) == {"out/old": "old"}


def test_ranks_with_different_targets(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        with writing(tmp_path / str(rank)):
            pass

    for error in run_threads(2, write, catch=True):
        assert isinstance(error, ValueError)
        assert "output" in str(error)
    assert list(tmp_path.iterdir()) == []
