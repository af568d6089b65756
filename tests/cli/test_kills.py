"""``kill -9`` of one rank and of all of them, at random moments: resumed, the job ends with the same bytes."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from distprune.jobs import PruneJob, StreamedJob, run_prune_job, run_streamed_job
from distprune.jobs.run import JobFiles
from tests.hf_models import TEXT, make_model, make_tokenizer
from tests.started import be_rank, by_hand
from tests.worlds import CONTEXT

pytestmark = [pytest.mark.launcher, pytest.mark.whole, pytest.mark.xdist_group("kills")]

NUM_BLOCKS = 5
SECONDS = 120  # for a start that nobody kills, on a busy machine
SECONDS_TO_END = 90  # for the rank that is left; what it was waiting for takes 20 to time out
# So long after what is waited for a kill comes at most, in seconds.
WHILE_LOADING, WITHIN_A_BLOCK, WHILE_EVALUATING = 0.5, 0.3, 0.2

Moment = Literal["load", "prune", "write", "finish"]
MOMENTS: dict[str, tuple[Moment, ...]] = {
    "one rank once": ("write",),
    "one rank": ("load", "write", "prune", "write", "finish"),
    "all": ("write", "prune", "finish"),  # no rank is left that could wait for another
}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """All but the output: blocks that take a few tenths of a second each, and an evaluation of about one."""
    folder = tmp_path_factory.mktemp("killed")
    model = make_model(folder / "model", num_hidden_layers=NUM_BLOCKS)
    make_tokenizer(model)
    (folder / "text.txt").write_text(TEXT * 8)
    line = "--pattern unstructured --sparsity 0.5 --samples 60 --own-words 0 --sequence-length 64 --timeout 20"
    text = str(folder / "text.txt")
    more = ["--calibration", text, "--eval", text, "--eval-tokens", "3200", "--eval-length", "16"]
    return ["prune", str(model), *line.split(), *more]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, arguments: list[str]) -> dict[str, str]:
    """The digests of a job that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")
    job = Job([*arguments, "--output", str(folder / "out")], folder)
    job.succeeds()
    return digests(folder / "out")


def digests(folder: Path) -> dict[str, str]:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}
    assert found
    return found


@pytest.fixture(scope="module")
def fine_tuning(tmp_path_factory: pytest.TempPathFactory, arguments: list[str]) -> list[str]:
    """All but the output: steps that save what they have done."""
    pruned = tmp_path_factory.mktemp("pruned") / "model"
    run_prune_job(PruneJob(model=arguments[1], output=str(pruned), sparsity=0.5))
    text = arguments[arguments.index("--calibration") + 1]
    line = f"--data {text} --teacher {arguments[1]} --steps 8 --batch-size 6 --sequence-length 64 --save-every 0"
    return ["finetune", str(pruned), *line.split(), "--timeout", "20"]


def be_streaming_rank(variables: dict[str, str], arguments: list[str], log: str) -> None:
    """Be a rank that takes its time for each file, and does not end before it is killed."""
    record = JobFiles.record

    def record_slowly(self: JobFiles, name: str, value: Any) -> None:
        record(self, name, value)
        time.sleep(0.03)

    JobFiles.record = record_slowly  # type: ignore[method-assign]
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

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
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

    def last_write(self) -> int:
        """When a file that is being written was written to."""
        with suppress(FileNotFoundError, ValueError):
            return max(path.stat().st_mtime_ns for path in (self.unfinished / "model").glob(".*.partial-distprune"))
        return 0

    def wait_for(self, moment: Moment, chance: random.Random) -> None:
        if moment == "load":
            time.sleep(chance.uniform(0, WHILE_LOADING))
        elif moment == "finish":
            self.until(lambda: self.num_done() == NUM_BLOCKS)
            time.sleep(chance.uniform(0, WHILE_EVALUATING))
        else:
            first = max(self.num_done(), 0)
            self.until(lambda: self.num_done() > first)
            if moment == "write":
                before = self.last_write()
                self.until(lambda: self.last_write() != before)
            else:
                time.sleep(chance.uniform(0, WITHIN_A_BLOCK))

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


@pytest.fixture
def start(arguments: list[str], tmp_path: Path) -> Iterator[Callable[[bool], Job]]:
    started: list[Job] = []

    def job(resume: bool) -> Job:
        more = ["--output", str(tmp_path / "out"), *(["--resume"] if resume else [])]
        started.append(Job([*arguments, *more], tmp_path))
        return started[-1]

    yield job
    for one in started:
        one.close()


@pytest.mark.parametrize("whom", MOMENTS)
def test_killed_again_and_again_and_resumed(
    tmp_path: Path, start: Callable[[bool], Job], expected: dict[str, str], whom: str
) -> None:
    chance = random.Random(f"{whom} 3")
    seen: list[int] = []
    for number, moment in enumerate(MOMENTS[whom]):
        job = start(number > 0)
        job.wait_for(moment, chance)
        victims = [chance.randrange(2)] if whom != "all" else chance.sample([0, 1], 2)
        job.kill(victims)
        job.has_ended(victims)
        seen.append(job.num_done())
        assert not (tmp_path / "out").exists()
        if number:
            before = seen[number - 1]
            said = f"going on at block {before} of {NUM_BLOCKS}" if before > 0 else "starting at the beginning"
            assert said in job.said()
    last = start(True)
    last.succeeds()
    assert f"going on at block {seen[-1]} of {NUM_BLOCKS}" in last.said()
    assert digests(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "out"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [block["index"] for block in report["pruning"]["blocks"]] == list(range(NUM_BLOCKS))


@pytest.mark.whole
def test_shrinking_killed_and_resumed(tmp_path: Path, arguments: list[str]) -> None:
    text = arguments[arguments.index("--calibration") + 1]
    line = "--mlp 0.5 --layer-criterion influence --samples 30 --sequence-length 64 --timeout 20"
    line += " --own-words 0"
    shrinking = ["shrink", arguments[1], "--calibration", text, "--layers", str(NUM_BLOCKS - 1), *line.split()]
    first = Job([*shrinking, "--output", str(tmp_path / "out")], tmp_path)
    first.until(lambda: first.num_done() == NUM_BLOCKS - 1)
    first.kill([0, 1])
    first.has_ended([0, 1])
    assert first.num_done() == NUM_BLOCKS - 1
    assert (first.unfinished / "layers.json").exists()  # they are not chosen again
    assert not (tmp_path / "out").exists()
    last = Job([*shrinking, "--output", str(tmp_path / "out"), "--resume"], tmp_path)
    last.succeeds()
    assert f"going on at block {NUM_BLOCKS - 1} of {NUM_BLOCKS - 1}\n" in last.said()
    Job([*shrinking, "--output", str(tmp_path / "whole")], tmp_path).succeeds()
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "out", "whole"]


@pytest.mark.whole
def test_fine_tuning_killed_and_resumed(tmp_path: Path, fine_tuning: list[str]) -> None:
    first = Job([*fine_tuning, "--output", str(tmp_path / "out")], tmp_path)
    first.until(lambda: first.num_done() > 2)
    first.kill([0, 1])
    first.has_ended([0, 1])
    num_done = first.num_done()
    assert not (tmp_path / "out").exists()
    last = Job([*fine_tuning, "--output", str(tmp_path / "out"), "--resume"], tmp_path)
    last.succeeds()
    assert f"going on after step {num_done}\n" in last.said()
    Job([*fine_tuning, "--output", str(tmp_path / "whole")], tmp_path).succeeds()
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.whole
def test_streaming_killed_and_resumed(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", num_hidden_layers=NUM_BLOCKS, max_shard_size="12KB")
    asked = ["prune", str(model), "--streamed", "--sparsity", "0.5", "--timeout", "20"]
    asked += ["--output", str(tmp_path / "out")]
    chance, num_done = random.Random(5), 0
    for number in range(3):
        job = Job([*asked, *(["--resume"] if number else [])], tmp_path, be_streaming_rank)
        job.until(lambda: job.num_done() > num_done)  # noqa: B023
        time.sleep(chance.uniform(0, 0.02))
        victims = chance.choice([[0], [1], [0, 1]])
        job.kill(victims)
        job.has_ended(victims)
        assert not (tmp_path / "out").exists()
        if number:
            assert f"going on after {num_done} of " in job.said()
        num_done = job.num_done()
    Job([*asked, "--resume"], tmp_path).succeeds()
    run_streamed_job(StreamedJob(model=str(model), output=str(tmp_path / "whole"), sparsity=0.5))
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "model", "out", "whole"]
