"""Outputs are whole or not there."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch

from distprune.checkpoint import output_lock, outputs
from distprune.checkpoint.outputs import writing
from distprune.collectives import slow
from distprune.collectives.agree import together
from distprune.collectives.base import Communicator
from distprune.collectives.communicator import Alone, communicator
from tests.sampling import only_whole
from tests.worlds import all_raise, run_threads

OLD = {"out/config.json": "old", "out/model.safetensors": "old"}


def make_old(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("old")
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_published_when_the_body_ends(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        with writing(tmp_path / "deep" / "out") as staging:
            (staging / f"file{rank}").write_text(str(rank))
            assert not (tmp_path / "deep" / "out").exists()

    run_threads(3, write)
    assert content(tmp_path) == {f"deep/out/file{rank}": str(rank) for rank in range(3)}


@pytest.mark.parametrize("make", [Path.mkdir, make_old])
def test_an_empty_directory_and_a_model_are_replaced(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "out")
    before = content(tmp_path)
    with writing(tmp_path / "out", overwrite=bool(before)) as staging:
        (staging / "new").write_text("new")
        assert content(tmp_path / "out") == {name.removeprefix("out/"): text for name, text in before.items()}
    assert content(tmp_path) == {"out/new": "new"}


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("is_exchanging", [True, False])
@pytest.mark.parametrize("error", [OSError("none left"), torch.OutOfMemoryError("none left")])
def test_nothing_changes_when_the_body_fails(
    tmp_path: Path, failing_rank: int, is_exchanging: bool, error: Exception
) -> None:
    make_old(tmp_path / "out")

    def write(rank: int) -> None:
        with writing(tmp_path / "out", overwrite=True) as staging:
            with together(communicator()) if is_exchanging else nullcontext():
                (staging / f"half{rank}").write_text("half")
                if rank == failing_rank:
                    raise error

    raised = run_threads(2, write, catch=True)
    assert raised[failing_rank] is error
    assert type(raised[1 - failing_rank]) is (OSError if isinstance(error, OSError) else RuntimeError)
    assert all("none left" in str(each) for each in raised)
    assert content(tmp_path) == OLD


def test_a_rank_lost_meanwhile_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comm, num_asked = Alone(), 0

    def lost(*_: object) -> None:
        nonlocal num_asked
        num_asked += 1
        raise RuntimeError("Connection closed by peer")

    def write() -> None:
        with writing(tmp_path / "out", comm):
            monkeypatch.setattr(comm, "_reduce_in_place", lost)
            comm.sum(torch.ones(1, dtype=torch.int64))

    with pytest.raises(RuntimeError, match="closed by peer"):
        write()
    assert num_asked == 1
    assert list(tmp_path.iterdir()) == []


def test_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writing(tmp_path / "out"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [outputs, output_lock])
def test_a_rank_lost_while_the_directory_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    @contextmanager
    def lost(_: Communicator, **facts: object) -> Iterator[None]:
        yield
        if facts:
            return
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(module, "together", lost)
    with pytest.raises(RuntimeError, match="closed by peer"), writing(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("error", [OSError("no"), SystemExit(143)])
def test_old_directory_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: int
) -> None:
    """The error is raised before the first rename, or between the two; the first of all is that of the lock."""
    make_old(tmp_path / "out")
    rename, num_renames = Path.rename, 0

    def fail(self: Path, target: Path) -> Path:
        nonlocal num_renames
        num_renames += 1
        if num_renames == step:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)

    def write() -> None:
        with writing(tmp_path / "out", overwrite=True) as staging:
            (staging / "new").write_text("new")

    with pytest.raises(type(error)):
        write()
    assert content(tmp_path) == OLD


KILLED = """
import os, pathlib, signal, sys
from distprune.checkpoint import outputs
from distprune.checkpoint.outputs import writing

def die(*_):
    os.kill(os.getpid(), {signal})

out, place = pathlib.Path(sys.argv[1]), sys.argv[2]
if place == "after":
    outputs.sync_file = lambda path: die() if path == out.parent else None
elif place == "between":
    rename = pathlib.Path.rename
    pathlib.Path.rename = lambda self, target: die() if target == out else rename(self, target)
with writing(out, overwrite=True) as staging:
    (staging / "config.json").write_text("new")
    (staging / "model.safetensors").write_text("new")
    if place == "body":
        die()
"""


@pytest.mark.parametrize(
    ("place", "left", "signal_number"),
    [
        ("body", "old", signal.SIGTERM),
        ("between", "old", signal.SIGKILL),
        ("after", "new", signal.SIGKILL),
        only_whole("body", "old", signal.SIGKILL),
        only_whole("between", "old", signal.SIGTERM),
        only_whole("after", "new", signal.SIGTERM),
    ],
)
@pytest.mark.sampled(1)
def test_what_a_killed_job_leaves(tmp_path: Path, place: str, left: str, signal_number: int) -> None:
    make_old(tmp_path / "out")
    program = KILLED.format(signal=int(signal_number))
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "out"), place], check=False)
    assert killed.returncode == -signal_number
    assert len(list(tmp_path.iterdir())) > 1
    with pytest.raises(OSError, match="disk full"), writing(tmp_path / "out", overwrite=True):
        raise OSError("disk full")
    assert content(tmp_path) == dict.fromkeys(OLD, left)


def test_what_a_killed_job_replaced_takes_the_place_of_an_empty_directory(tmp_path: Path) -> None:
    make_old(tmp_path / ".out.replaced-distprune")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="overwrite=True"), writing(tmp_path / "out"):
        pass
    assert content(tmp_path) == OLD


def test_files_that_are_like_leftovers_stay(tmp_path: Path) -> None:
    for name in (".out.partial-mine", ".out2.partial-distprune", ".out.unfinished"):
        (tmp_path / name).write_text("mine")
    before = content(tmp_path)
    with writing(tmp_path / "out"):
        pass
    assert content(tmp_path) == before


def test_two_jobs_at_once(tmp_path: Path) -> None:
    def write(_: int) -> None:
        with writing(tmp_path / "out"):
            pass

    with writing(tmp_path / "out") as staging:
        (staging / "first").write_text("first")
        match = f"is being written by process {os.getpid()} on {platform.node()}"
        all_raise(2, write, kind=OSError, match=match)
    assert content(tmp_path) == {"out/first": "first"}


def test_the_lock_is_no_link_to_follow(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / ".out.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match=r"out\.lock"), writing(tmp_path / "out"):
        pass
    assert content(tmp_path)["mine"] == "mine"


def test_everything_is_on_the_disk_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with writing(tmp_path / "out") as staging:
        for name in ("config.json", "report.json"):
            (staging / name).write_text("new")
    assert sorted(synced[:2]) == ["config.json", "report.json"]
    assert synced[2].startswith(".out.partial-")
    assert synced[3:] == [tmp_path.name]


def test_ranks_keep_in_touch_while_one_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def slow_disk(path: Path) -> None:
        synced.append(path.name)
        time.sleep(0.2 if path.name == "0" else 0)

    def write(_: int) -> int:
        comm = communicator()
        with writing(tmp_path / "out", comm) as staging:
            if comm.rank == 0:
                for name in "0123":
                    (staging / name).touch()
        return comm.traffic.num_rounds

    monkeypatch.setattr(outputs, "sync_file", slow_disk)
    monkeypatch.setattr(slow, "_BEAT", 0.02)
    assert min(run_threads(2, write)) > 13  # 11 without a wait
    assert sorted(name for name in synced if len(name) == 1) == ["0", "1", "2", "3"]


def test_ranks_with_different_targets(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        with writing(tmp_path / str(rank)):
            pass

    all_raise(2, write, kind=ValueError, match="output")
    assert list(tmp_path.iterdir()) == []
