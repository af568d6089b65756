"""``kill -9`` of one rank and of all of them, at random moments: resumed, the job ends with the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from distprune.jobs import PruneJob, run_prune_job
from distprune.jobs.run import JobFiles
from tests.hf_models import TEXT, make_model, make_tokenizer
from tests.started import be_rank, by_hand
from tests.worlds import CONTEXT

pytestmark = [pytest.mark.launcher, pytest.mark.whole, pytest.mark.xdist_group("kills")]

NUM_BLOCKS = 5
SECONDS = 120  # for a start that nobody kills, on a busy machine
SECONDS_TO_END = 90  # for the rank that is left; what it was waiting for takes 20 to time out
# By kind of job: seconds from what is waited for to the kill, at most. An evaluation takes about one.
LATE = {"prune": 0.2, "finetune": 0.2}
# By kind of job: all but its output. Each step is saved.
COMMANDS = {
    "prune": "prune {model} --pattern unstructured --sparsity 0.5 --samples 60 --own-words 0 --sequence-length 64 "
    "--calibration {text} --eval {text} --eval-tokens 3200 --eval-length 16",
    "shrink": f"shrink {{model}} --layers {NUM_BLOCKS - 1} --mlp 0.5 --layer-criterion influence --own-words 0 "
    "--calibration {text} --samples 30 --sequence-length 64",
    "finetune": "finetune {pruned} --data {text} --teacher {model} --steps 8 --batch-size 6 --sequence-length 64 "
    "--save-every 0",
    "streamed": "prune {files} --streamed --sparsity 0.5",
}
# What it says when it goes on behind so many blocks, steps or files.
GOING_ON = {
    "prune": f"going on at block {{}} of {NUM_BLOCKS}\n",
    "shrink": f"going on at block {{}} of {NUM_BLOCKS - 1}\n",
    "finetune": "going on after step {}\n",
    "streamed": "going on after {} of ",
}
# By who is killed: the kind of job, and how many blocks, steps or files are done then; -1: at once.
KILLS: dict[str, tuple[str, tuple[int, ...]]] = {
    "one rank": ("prune", (-1, 1, 2, NUM_BLOCKS)),
    "all": ("prune", (1, 2, NUM_BLOCKS)),  # no rank is left that could wait for another
    "all that shrink": ("shrink", (NUM_BLOCKS - 1,)),
    "all that train": ("finetune", (1,)),
    "one rank that streams": ("streamed", (1, 2, 3)),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("killed")
    model = make_model(folder / "model", num_hidden_layers=NUM_BLOCKS)
    make_tokenizer(model)
    make_model(folder / "files", num_hidden_layers=NUM_BLOCKS, max_shard_size="12KB")
    (folder / "text.txt").write_text(TEXT * 8)
    run_prune_job(PruneJob(model=str(model), output=str(folder / "pruned"), sparsity=0.5))
    names = {"model": "model", "text": "text.txt", "pruned": "pruned", "files": "files"}
    return {name: str(folder / file) for name, file in names.items()}


def digests(folder: Path) -> dict[str, str]:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}
    assert found
    return found


def be_slow_rank(variables: dict[str, str], arguments: list[str], log: str) -> None:
    """Be a rank that takes its time to write and to record, so that it is killed meanwhile now and then."""
    record, write = JobFiles.record, os.pwrite

    def record_slowly(self: JobFiles, name: str, value: Any) -> None:
        record(self, name, value)
        time.sleep(0.03)

    def write_slowly(*arguments: Any) -> int:
        time.sleep(0.003)
        return write(*arguments)

    JobFiles.record, os.pwrite = record_slowly, write_slowly  # type: ignore[method-assign]
    be_rank(variables, arguments, log)


class Job:
    """Two ranks with the variables that a launcher sets, and no launcher that would end one after the other."""

    def __init__(self, arguments: list[str], folder: Path, be: Callable[..., None] = be_rank) -> None:
        self.unfinished = folder / ".out.unfinished"
        self._log = folder / "log.txt"
        self._log.write_text("")
        self.ranks = [CONTEXT.Process(target=be, args=(own, arguments, str(self._log))) for own in by_hand(2)]
        for rank in self.ranks:
            rank.start()

    def said(self) -> str:
        return self._log.read_text()

    def until(self, num: int, said: str) -> None:
        """Wait until so many are done, and this was ``said``."""
        deadline = time.monotonic() + SECONDS
        while self.num_done() < num or said not in self.said():
            assert all(rank.is_alive() for rank in self.ranks), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.002)

    def num_done(self) -> int:
        """Blocks or files that are recorded, or steps that are saved; -1: there is no folder yet."""
        if not (self.unfinished / "recipe.json").exists():
            return -1
        with suppress(FileNotFoundError):  # the folder has just gone
            training = self.unfinished / "training.json"
            if training.exists():
                return len(json.loads(training.read_text())["value"]["losses"])
        return len([*self.unfinished.glob("model*.json")])

    def kill(self, whom: list[int]) -> None:
        assert all(rank.is_alive() for rank in self.ranks), self.said()
        for rank in whom:
            self.ranks[rank].kill()

    def has_ended(self, killed: list[int]) -> None:
        """Wait until both ranks are gone; fail if one hangs, or takes it for a success."""
        for number, rank in enumerate(self.ranks):
            rank.join(SECONDS_TO_END)
            assert rank.exitcode == (-signal.SIGKILL if number in killed else 1), self.said()

    def succeeds(self) -> None:
        for rank in self.ranks:
            rank.join(SECONDS)
            assert rank.exitcode == 0, self.said()

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize("whom", KILLS)
def test_killed_again_and_again_and_resumed(tmp_path: Path, places: dict[str, str], whom: str) -> None:
    kind, moments = KILLS[whom]
    going_on, arguments = GOING_ON[kind], [*COMMANDS[kind].format(**places).split(), "--timeout", "20", "--output"]
    chance, before = random.Random(f"{whom} 3"), -1
    for num in moments:
        began = going_on.format(before) if before > 0 else "" if num == moments[0] else "starting at the beginning"
        resume = [] if num == moments[0] else ["--resume"]
        with closing(Job([*arguments, str(tmp_path / "out"), *resume], tmp_path, be_slow_rank)) as job:
            job.until(num, began)
            time.sleep(chance.uniform(0, LATE.get(kind, 0)))
            victims = [0, 1] if whom.startswith("all") else [chance.randrange(2)]
            job.kill(victims)
            job.has_ended(victims)
        assert not (tmp_path / "out").exists()
        before = job.num_done()
        assert kind != "shrink" or (job.unfinished / "layers.json").exists()  # they are not chosen again
    for output, more in (("out", ["--resume"]), ("whole", [])):
        with closing(Job([*arguments, str(tmp_path / output), *more], tmp_path)) as job:
            job.succeeds()
        assert (going_on.format(before) in job.said()) == (output == "out")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "out", "whole"]
    if kind == "prune":
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert [block["index"] for block in report["pruning"]["blocks"]] == list(range(NUM_BLOCKS))
