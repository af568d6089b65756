"""What goes wrong with a job, and outside of it: no mishap costs what is done, nor what is the user's. A row a job."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distprune.checkpoint.hf_save import ModelWriter
from distprune.jobs import OneShotJob, ShrinkJob
from tests.jobs.jobs_of_a_kind import KINDS, RESUMABLE, files, left, run, run_on_rank
from tests.jobs.test_prune import Heard
from tests.sampling import only_whole, pairs_first
from tests.worlds import ProcessPool, run_threads

# What may be another when a job goes on: it changes no bit of what is written.
FREE: dict[str, dict[str, Any]] = {
    "one-shot": {"offload": True, "evaluation_tokens": 99},
    "shrink": {"offload": True},
    "finetune": {"save_every": 9.0},
    "streamed": {"sync_files": False},
}
OTHERS: dict[str, dict[str, Any]] = {  # another recipe
    "one-shot": {"samples": 2, "seed": 3, "targets": "dense", "dtype": torch.bfloat16},
    "shrink": {"mlp": 0.5},
    "finetune": {"steps": 7, "learning_rate": 0.1},
    "streamed": {"method": "random"},
}


pytestmark = pytest.mark.usefixtures("draws_nothing")


def is_whole(job: Any, wanted: dict[str, bytes], *, exactly: bool = True) -> bool:
    """Whether the output is what is ``wanted``, and nothing is left beside it; if not ``exactly``, but for rounding."""
    output = Path(job.output)
    written = files(output)
    if not exactly:
        assert written.keys() == wanted.keys()
        other = output.with_name("wanted")
        other.mkdir()
        for name in [name for name in wanted if name.endswith(".safetensors")]:
            (other / name).write_bytes(wanted[name])
            for key, tensor in load_file(output / name).items():
                is_close = torch.isclose(tensor, load_file(other / name)[key], rtol=1e-3, atol=1e-5)
                # Of scores that all but tie another goes.
                least = 0.8 if isinstance(job, OneShotJob | ShrinkJob) else 1.0
                assert is_close.double().mean() >= least, key
        shutil.rmtree(other)
    return (not exactly or written == wanted) and [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(("kind", "item", "num_ranks"), pairs_first([*RESUMABLE], [0, 1], [(2, 2), (1, 2), (2, 1)]))
@pytest.mark.sampled(6)
def test_killed_it_goes_on_also_on_other_ranks(
    make: Callable[[str], Any],
    expected: Callable[..., dict[str, bytes]],
    pool: ProcessPool,
    kind: str,
    item: int,
    num_ranks: tuple[int, int],
) -> None:
    job, (first, second) = make(kind), num_ranks
    again = dataclasses.replace(job, resume=True)
    assert pool.run(first, run_on_rank, again, item) == ["killed"] * first  # with nothing there it begins
    assert not Path(job.output).exists()
    before, others = files(left(job)), OTHERS[kind] if item else {}
    if item:
        pool.all_say(second, run_on_rank, job, match="^FileExistsError: .*resume=True .--resume. goes on with it")
    for name, value in others.items():
        match = f"^ValueError: .*cannot be resumed, the job was another: --{name.replace('_', '-')}"
        pool.all_say(second, run_on_rank, dataclasses.replace(again, **{name: value}), match=match)
    assert files(left(job)) == before
    assert pool.run(second, run_on_rank, dataclasses.replace(again, **FREE[kind])) == [""] * second
    assert is_whole(job, expected(job, second), exactly=first == second)
    report = json.loads((Path(job.output) / "report.json").read_text())
    work = report.get("removal") or report.get("training") or report["pruning"]
    assert work.get("resumed_at", item) == item
    match = f"^FileExistsError: nothing is left to resume: {job.output} is finished, it holds a report.json$"
    pool.all_say(second, run_on_rank, again, match=match)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def spoil(path: Path) -> None:
    path.write_bytes(b"x" * 40 + path.read_bytes()[40:])


@pytest.mark.parametrize(("kind", "damage"), pairs_first([*RESUMABLE], [cut, spoil, Path.unlink]))
@pytest.mark.sampled(5)
def test_a_damaged_file_is_made_again_or_named(
    make: Callable[[str], Any],
    expected: Callable[..., dict[str, bytes]],
    pool: ProcessPool,
    kind: str,
    damage: Callable[[Path], None],
) -> None:
    job = make(kind)
    assert run_on_rank(0, job, 1) == "killed"
    written = {"one-shot": "model/model.layers.0.*", "shrink": "blocks/model.layers.0.*", "finetune": "state-1/*"}
    damage(min(left(job).glob(written.get(kind, "model/*.safetensors"))))
    again, heard = dataclasses.replace(job, resume=True), Heard()
    if kind == "finetune":
        pool.all_say(2, run_on_rank, again, match="^ValueError: .*state-1 is not as it was written, remove")
        return
    run(again, heard)
    assert any("damaged" in said for said in heard.said)
    assert is_whole(job, expected(job))


@pytest.mark.parametrize("kind", ["one-shot", "shrink"])
def test_a_block_that_one_rank_cannot_read_is_made_again_from_what_it_was(
    make: Callable[[str], Any],
    expected: Callable[..., dict[str, bytes]],
    pool: ProcessPool,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    job = make(kind)
    assert pool.run(2, run_on_rank, job, 1) == ["killed"] * 2
    written = ModelWriter.written

    def stale(self: ModelWriter, path: Path, stored: Any) -> Any:
        if self.comm.rank == 1:
            raise FileNotFoundError(path)  # as a file system over a network does for a while
        return written(self, path, stored)

    monkeypatch.setattr(ModelWriter, "written", stale)
    run_threads(2, lambda _: run(dataclasses.replace(job, resume=True)))
    assert is_whole(job, expected(job, 2))


@pytest.mark.parametrize("kind", RESUMABLE)
def test_a_damaged_record_is_named(make: Callable[[str], Any], pool: ProcessPool, kind: str) -> None:
    job = make(kind)
    assert run_on_rank(0, job, 1) == "killed"
    record = next(path for path in left(job).glob("*.json") if path.name != "recipe.json")
    record.write_text("no record")
    match = f"{record.name} is corrupt: it holds no JSON"
    pool.all_say(2, run_on_rank, dataclasses.replace(job, resume=True), match=match)


@pytest.mark.parametrize("kind", RESUMABLE)
def test_a_folder_that_is_not_ours_is_left(make: Callable[[str], Any], kind: str) -> None:
    job = make(kind)
    left(job).mkdir(parents=True)
    (left(job) / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds more than a job has written; move it away"):
        run(job)
    assert files(left(job)) == {"notes.txt": b"mine"}


def run_with_full_disk(rank: int, job: Any, full_rank: int, num_writes: int) -> str:
    """Run the job; on ``full_rank`` the disk is full after so many writes."""
    room = [num_writes] if rank == full_rank else [1 << 20]
    write = os.pwrite

    def until_full(*arguments: Any) -> int:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", until_full)
        return run_on_rank(rank, job)


@pytest.mark.parametrize(("kind", "full_rank", "num_writes"), pairs_first([*KINDS], [0, 1], [0, 12]))
@pytest.mark.sampled(5)
def test_a_full_disk(
    make: Callable[[str], Any],
    expected: Callable[..., dict[str, bytes]],
    pool: ProcessPool,
    kind: str,
    full_rank: int,
    num_writes: int,
) -> None:
    job = make(kind)
    match = "^OSError: .*cannot write '.*No space left on device"
    pool.all_say(2, run_with_full_disk, job, full_rank, num_writes, match=match)
    assert not Path(job.output).exists()
    assert left(job).exists() == (kind != "prune" and (kind != "streamed" or num_writes > 0))
    assert pool.run(2, run_on_rank, job if kind == "prune" else dataclasses.replace(job, resume=True)) == ["", ""]
    assert is_whole(job, expected(job, 2))


def run_with_little_room(rank: int, job: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        return run_on_rank(rank, job)


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_too_small(make: Callable[[str], Any], pool: ProcessPool, kind: str) -> None:
    job = make(kind)
    pool.all_say(2, run_with_little_room, job, match="^OSError: .*has 1,000 bytes free, and")
    assert not Path(job.output).exists()


def run_with_watcher(rank: int, job: Any, fails_at: str) -> str:
    """Run the job; the second rank's watcher fails."""
    return run_on_rank(rank, job, watcher=Heard(fails_at if rank == 1 else ""))


@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        *(("prune", "saving"), ("one-shot", "model.layers.1"), ("shrink", "model.layers.0")),
        *(("finetune", "training"), ("streamed", "pruning")),
    ],
)
def test_a_watcher_that_fails_on_one_rank_ends_the_job_on_all(
    make: Callable[[str], Any], pool: ProcessPool, kind: str, stage: str
) -> None:
    job, said = make(kind), f"the watcher failed: KeyError('the watcher broke at {stage}')"
    errors = [f"RuntimeError: rank 1 of 2: {said}", f"RuntimeError: {said}"]
    assert pool.run(2, run_with_watcher, job, stage) == errors
    assert not Path(job.output).exists()


@pytest.mark.parametrize("num_ranks", [1, only_whole(2)])
def test_all_that_is_written_is_synced(
    make: Callable[[str], Any], num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Counter[str] = Counter()
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        found[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name] += 1
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    job = make("streamed")
    run_threads(num_ranks, lambda _: run(job))
    names = {name.removeprefix(".").removesuffix(".partial-distprune") for name in found}
    assert names >= files(Path(job.output)).keys() | {"model", "outputs", "report.json", "recipe.json"}
    found.clear()
    run(dataclasses.replace(job, overwrite=True, sync_files=False))
    assert found.keys() <= {".recipe.json.partial-distprune"}
