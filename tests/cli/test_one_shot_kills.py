"""``kill -9`` of one rank and of all of them, at random moments: resumed, the job ends with the same bytes."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.cli.test_launches import TORCHRUN, environment
from tests.models import TEXT, make_model, make_tokenizer

psutil = pytest.importorskip("psutil")

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("launcher")]

NUM_BLOCKS = 8
SECONDS = 120  # for a start that nobody kills, on a busy machine
SECONDS_TO_END = 60  # for the ranks that are left, when one is killed
# So long after what is waited for a kill comes at most, in seconds.
WHILE_LOADING, WITHIN_A_BLOCK, WHILE_EVALUATING = 5.0, 0.3, 0.2

Moment = Literal["load", "prune", "write", "finish"]
MOMENTS: tuple[Moment, ...] = ("load", "write", "prune", "write", "finish")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """All but the output: blocks that take a few tenths of a second each, and an evaluation of about one."""
    folder = tmp_path_factory.mktemp("killed")
    model = make_model(folder / "model", num_hidden_layers=NUM_BLOCKS)
    make_tokenizer(model)
    (folder / "text.txt").write_text(TEXT * 8)
    line = "--method sparsegpt --pattern unstructured --amount 0.5 --samples 240 --sequence-length 64 --timeout 60"
    text = str(folder / "text.txt")
    more = ["--calibration", text, "--eval", text, "--eval-tokens", "3200", "--eval-length", "16"]
    return [*TORCHRUN, "prune", str(model), *line.split(), *more]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, command: list[str]) -> dict[str, str]:
    """The digests of a job that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")
    job = Job([*command, "--output", str(folder / "out")], folder)
    assert job.launcher.wait(SECONDS) == 0, job.said()
    return digests(folder / "out")


def digests(folder: Path) -> dict[str, str]:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}
    assert found
    return found


class Job:
    """torchrun and its two ranks."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.unfinished = folder / ".out.unfinished"
        self._log = folder / "log.txt"
        with self._log.open("w") as log:
            self.launcher = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        self._ranks: dict[str, Any] = {}

    def said(self) -> str:
        return self._log.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.launcher.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.002)

    def ranks(self) -> dict[str, Any]:
        """The processes of the ranks, once both are there."""

        def are_there() -> bool:
            for child in psutil.Process(self.launcher.pid).children():
                try:
                    variables = child.environ()
                except psutil.Error:
                    continue
                if variables.get("RANK") in ("0", "1"):
                    self._ranks[variables["RANK"]] = child
            return len(self._ranks) == 2

        if not self._ranks:
            self.until(are_there)
        return self._ranks

    def num_done(self) -> int:
        """Blocks that are recorded; -1: there is no journal yet."""
        try:
            return int(json.loads((self.unfinished / "journal.json").read_text())["blocks_done"])
        except FileNotFoundError:
            return -1

    def last_write(self) -> int:
        try:
            return (self.unfinished / "model.safetensors").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def wait_for(self, moment: Moment, chance: random.Random) -> None:
        self.ranks()
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

    def kill(self, whom: list[Any]) -> None:
        assert self.launcher.poll() is None, self.said()
        for process in whom:
            process.send_signal(signal.SIGKILL)

    def has_ended(self) -> None:
        """Wait until the launcher and both ranks are gone; fail if one hangs."""
        assert self.launcher.wait(SECONDS_TO_END) != 0
        deadline = time.monotonic() + SECONDS_TO_END
        while not all(map(is_gone, self.ranks().values())):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def close(self) -> None:
        for process in (self.launcher, *self._ranks.values()):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.launcher.wait()


def is_gone(process: Any) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def start(command: list[str], tmp_path: Path) -> Iterator[Callable[[bool], Job]]:
    started: list[Job] = []

    def job(resume: bool) -> Job:
        more = ["--output", str(tmp_path / "out"), *(["--resume"] if resume else [])]
        started.append(Job([*command, *more], tmp_path))
        return started[-1]

    yield job
    for one in started:
        one.close()


@pytest.mark.parametrize("whom", ["one rank", "all"])
def test_killed_five_times_and_resumed(
    tmp_path: Path, start: Callable[[bool], Job], expected: dict[str, str], whom: str
) -> None:
    chance = random.Random(f"{whom} 3")
    seen: list[int] = []
    for number, moment in enumerate(MOMENTS):
        job = start(number > 0)
        job.wait_for(moment, chance)
        ranks = job.ranks()
        victims = [ranks[chance.choice("01")]] if whom == "one rank" else [job.launcher, *ranks.values()]
        chance.shuffle(victims)
        job.kill(victims)
        job.has_ended()
        seen.append(job.num_done())
        assert not (tmp_path / "out").exists()
        if number:
            before = seen[number - 1]
            said = f"going on at block {before} of {NUM_BLOCKS}" if before > 0 else "starting at the first block"
            assert said in job.said()
    last = start(True)
    assert last.launcher.wait(SECONDS) == 0, last.said()
    assert f"going on at block {NUM_BLOCKS} of {NUM_BLOCKS}" in last.said()
    assert digests(tmp_path / "out") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "out"]
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [block["index"] for block in report["pruning"]["blocks"]] == list(range(NUM_BLOCKS))
