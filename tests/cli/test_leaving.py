"""Ranks that end before the others, with no launcher to look after them; and a terminal that is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from distprune.cli.launchers import detect
from distprune.cli.meeting import Meeting
from distprune.jobs import PruneJob, run_prune_job
from distprune.jobs.stretches import StretchWriter
from distprune.pruning.streamed import StreamedPruning
from tests.cli.test_launches import finish
from tests.hf_models import make_model
from tests.jobs.test_prune import contents
from tests.sampling import only_whole
from tests.started import be_rank, by_hand
from tests.worlds import CONTEXT

pytestmark = [pytest.mark.launcher, pytest.mark.xdist_group("launcher")]

SECONDS = 60  # on a busy machine, for what takes ten; what nobody ends takes the timeout below
LINE = ["prune", "{model}", "--output", "{out}", "--sparsity", "0.3", "--timeout", "300"]
LONG = ["--eval", "{long}", "--eval-tokens", "250000", "--eval-length", "16"]


class Pair:
    """Two ranks, with a log each."""

    def __init__(self, folder: Path, model: Path, text: Path) -> None:
        self.folder = folder
        (folder / "long.txt").write_text(text.read_text() * 100)
        self.outputs = folder / "outputs"
        self.places = {
            "model": model,
            "pruned": folder / "pruned",
            "text": text,
            "out": self.outputs / "out",
            "long": folder / "long.txt",
        }
        self.ranks: list[BaseProcess] = []
        self.variables = by_hand(2)

    def start(self, first: list[str], second: list[str]) -> None:
        self.variables = by_hand(2)
        for rank, line in enumerate((first, second)):
            self.start_one(rank, line)

    def start_one(self, rank: int, line: list[str], be: Callable[..., None] = be_rank) -> BaseProcess:
        arguments = [word.format(**self.places) for word in line]
        log = str(self.folder / f"log{rank}")
        self.ranks.append(CONTEXT.Process(target=be, args=(self.variables[rank], arguments, log)))
        self.ranks[-1].start()
        return self.ranks[-1]

    def is_under_way(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not list(self.outputs.glob(".out.partial-*/")):
            assert time.monotonic() < deadline, self.said(0) + self.said(1)
            time.sleep(0.02)

    def code(self, rank: int) -> int | None:
        self.ranks[rank].join(SECONDS)
        return self.ranks[rank].exitcode

    def said(self, rank: int) -> str:
        return (self.folder / f"log{rank}").read_text()


@pytest.fixture
def pair(tmp_path: Path, model_folder: Path, text_file: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, model_folder, text_file)
    yield pair
    for rank in pair.ranks:
        rank.kill()
        rank.join()


@pytest.mark.parametrize(
    ("leaving", "line", "code", "shown"),
    [
        (0, ["prune", "--help"], 0, "Usage:"),
        (1, [*LINE, "--loud"], 2, "prune takes no --loud"),
        (1, ["prune", "m", "--output", "o", "--pattern", "4:2"], 2, "4:2 is not a pattern"),
    ],
)
@pytest.mark.sampled(1)
def test_a_rank_that_does_not_come_ends_the_other(
    pair: Pair, leaving: int, line: list[str], code: int, shown: str
) -> None:
    pair.start(*((line, LINE) if leaving == 0 else (LINE, line)))
    assert pair.code(leaving) == code
    assert pair.code(1 - leaving) == 1
    assert shown in pair.said(leaving)
    assert not (pair.outputs / "out").exists()


def test_a_rank_that_never_comes(pair: Pair) -> None:
    process = pair.start_one(0, [*LINE[:-1], "5"])
    process.join(30)  # it takes 5, and to start and to leave
    assert process.exitcode == 1
    assert "not all 2 ranks came within 5 seconds" in pair.said(0)


CALIBRATED = ["--calibration", "{text}", "--samples", "2", "--own-words", "0", "--sequence-length", "16"]
EVALUATED = ["--eval", "{text}", "--eval-tokens", "64", "--eval-length", "16"]
TUNED = ["finetune", "{pruned}", "--data", "{text}", "--steps", "2", "--batch-size", "2", "--sequence-length", "16"]
# By what fails: the command, and whether both ranks come to know why.
FAILING: dict[str, tuple[list[str], bool]] = {
    "evaluation": ([*LINE, *EVALUATED], True),
    "training forward": ([*TUNED, "--output", "{out}", "--timeout", "300"], False),
    "training backward": ([*TUNED, "--output", "{out}", "--timeout", "300"], False),
    "evaluation of what is calibrated": ([*LINE, *CALIBRATED, *EVALUATED], True),
    "allocation": ([*LINE, *CALIBRATED, "--allocation", "gradients"], True),
    "evaluation of what is trained": ([*TUNED, "--output", "{out}", "--timeout", "300", *EVALUATED], True),
    "layers by loss": (
        ["shrink", "{model}", "--output", "{out}", "--layers", "1", *CALIBRATED, "--timeout", "300"],
        True,
    ),
}


def be_rank_that_fails(fails: str, variables: dict[str, str], arguments: list[str], log: str) -> None:
    """Be a rank with too little memory for the second MLP that it runs."""
    forward, num_left = LlamaMLP.forward, 2

    def failing(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        nonlocal num_left
        output: torch.Tensor = forward(self, x)
        num_left -= output.requires_grad or not fails.startswith("training")
        if num_left:
            return output
        if fails.endswith("backward"):
            output.register_hook(lambda _: torch.empty(2**60, dtype=torch.uint8))  # type: ignore[no-untyped-call]
            return output
        return output + torch.empty(2**60)

    LlamaMLP.forward = failing
    be_rank(variables, arguments, log)


@pytest.mark.parametrize("fails", [*list(FAILING)[:3], *map(only_whole, list(FAILING)[3:])])
def test_a_rank_that_fails_in_a_forward_ends_the_other(pair: Pair, fails: str) -> None:
    line, is_told = FAILING[fails]
    if "{pruned}" in line:
        run_prune_job(PruneJob(model=str(pair.places["model"]), output=str(pair.places["pruned"]), sparsity=0.3))
    pair.start_one(0, line)
    pair.start_one(1, line, partial(be_rank_that_fails, fails))
    assert (pair.code(0), pair.code(1)) == (1, 1)
    cause = "rank 1 has run out of memory while" if is_told else "out of memory while training"
    assert cause in (pair.said(0) if is_told else pair.said(1))
    assert "Traceback" not in pair.said(0) + pair.said(1)
    assert is_told or "another rank has ended" in pair.said(0)
    assert not (pair.outputs / "out").exists()


def be_rank_without_threads(num_left: int, variables: dict[str, str], arguments: list[str], log: str) -> None:
    """Be a rank that can start so many threads, as with ``ulimit -v``."""
    start, left = threading.Thread.start, [True] * num_left

    def starting(self: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(self)

    threading.Thread.start = starting  # type: ignore[method-assign]
    be_rank(variables, arguments, log)


NUM_OF_MEETING = 4  # threads of a rank that are there before its job begins
# By the job: its command, and how many threads a rank starts in it before the output is where it belongs.
STARTING: dict[str, tuple[list[str], int]] = {
    "prune": (LINE, 2),
    "streamed": ([*LINE, "--streamed"], 4),
    "calibrated": ([*LINE, *CALIBRATED], 3),
    "shrink": (["shrink", "{model}", "--output", "{out}", "--mlp", "0.5", *CALIBRATED, "--no-speed"], 4),
    "finetune": ([*TUNED, "--output", "{out}"], 2),
}
NUM_LEFT = [("prune", num) for num in range(NUM_OF_MEETING)]
NUM_LEFT += [(job, NUM_OF_MEETING + num) for job, (_, more) in STARTING.items() for num in range(more)]


@pytest.mark.parametrize(
    ("job", "num_left"), [("prune", NUM_OF_MEETING), *(only_whole(*each) for each in NUM_LEFT if each != ("prune", 4))]
)
def test_a_rank_that_cannot_start_a_thread_says_so_and_ends_the_other(pair: Pair, job: str, num_left: int) -> None:
    line = STARTING[job][0]
    if "{pruned}" in line:
        run_prune_job(PruneJob(model=str(pair.places["model"]), output=str(pair.places["pruned"]), sparsity=0.3))
    pair.start_one(0, line)
    pair.start_one(1, line, partial(be_rank_without_threads, num_left))
    assert (pair.code(0), pair.code(1)) == (1, 1)
    assert "can't start new thread" in (pair.said(1) if num_left < NUM_OF_MEETING else pair.said(0))
    assert not (pair.outputs / "out").exists()


CUT_OFF: dict[str, tuple[Any, str, list[str]]] = {
    "choosing": (StreamedPruning, "__init__", [*LINE, "--streamed"]),
    "writing": (StretchWriter, "write", [*LINE, "--streamed"]),
}


def be_rank_while_weights_are_cut_off(
    when: str, weights: str, variables: dict[str, str], arguments: list[str], log: str
) -> None:
    owner, name, _ = CUT_OFF[when]
    method = getattr(owner, name)

    def cutting(*given: Any) -> Any:
        os.truncate(weights, 4096)
        return method(*given)

    setattr(owner, name, cutting)
    be_rank(variables, arguments, log)


@pytest.mark.parametrize("when", CUT_OFF)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.sampled(2)
def test_a_file_that_is_cut_off_while_it_is_read_is_named(
    pair: Pair, tmp_path: Path, when: str, num_ranks: int
) -> None:
    """The system sends SIGBUS, which would kill the process without a word."""
    model = make_model(tmp_path / "model", hidden_size=64)
    pair.places["model"] = model
    weights = str(model / "model.safetensors")
    pair.variables = by_hand(num_ranks) if num_ranks > 1 else [{}]
    for rank in range(num_ranks):
        pair.start_one(rank, CUT_OFF[when][2], partial(be_rank_while_weights_are_cut_off, when, weights))
    assert [pair.code(rank) for rank in range(num_ranks)] == [1] * num_ranks
    said = "".join(pair.said(rank) for rank in range(num_ranks))
    assert f"{weights} has become shorter while it was read" in said
    assert "Traceback" not in said
    assert not (pair.outputs / "out").exists()


def be_rank_that_is_lost_at_the_end(variables: dict[str, str], arguments: list[str], log: str) -> None:
    Meeting.finish = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
    be_rank(variables, arguments, log)


@pytest.mark.whole
def test_a_rank_lost_when_all_is_done_does_not_hold_up_the_first(pair: Pair) -> None:
    first, second = pair.start_one(0, LINE), pair.start_one(1, LINE, be_rank_that_is_lost_at_the_end)
    second.join(SECONDS)
    assert second.exitcode == -signal.SIGKILL
    first.join(30)  # it takes two silences
    assert first.exitcode == 0
    assert (pair.outputs / "out").exists()


def test_a_mistake_of_all_ranks_is_one_line_from_the_first(pair: Pair) -> None:
    for number, line in enumerate(([*LINE, "--loud"], ["prune", "nowhere", *LINE[2:]])):
        pair.start(line, line)
        assert (pair.code(2 * number), pair.code(2 * number + 1)) == (2 - number, 2 - number)
    assert "prune takes no --loud" in pair.said(0)
    assert pair.said(0).count("error: there is no model directory") == 1
    assert pair.said(0).endswith("\n")
    assert pair.said(1) == ""


@pytest.mark.parametrize("leaving", [0, 1])
@pytest.mark.sampled(1)
def test_sigterm_ends_a_rank_that_waits_for_the_other_and_then_the_other(pair: Pair, leaving: int) -> None:
    pair.start([*LINE, *LONG], [*LINE, *LONG])
    pair.is_under_way()
    other = pair.ranks[1 - leaving].pid
    assert other is not None
    os.kill(other, signal.SIGSTOP)
    time.sleep(1)  # so that the one that is left waits inside a collective, where no Python code runs
    pair.ranks[leaving].terminate()
    assert pair.code(leaving) == 128 + signal.SIGTERM
    os.kill(other, signal.SIGCONT)
    assert pair.code(1 - leaving) == 1
    assert not (pair.outputs / "out").exists()


def be_rank_that_waits(variables: dict[str, str], _: list[str], log: str) -> None:
    os.environ.update(variables)
    meeting = Meeting(detect(os.environ), timedelta(seconds=SECONDS))
    signal.signal(signal.SIGTERM, lambda *_: None)
    meeting.attend()
    Path(log).write_text("here")
    time.sleep(2 * SECONDS)


@pytest.mark.whole
def test_sigterm_is_told_where_the_host_of_the_store_stands_still(pair: Pair) -> None:
    """Nothing else ends the first rank here: it waits for no peer, but for what one would say, as while groups form."""
    first, second = (pair.start_one(rank, [], be_rank_that_waits) for rank in range(2))
    while not all((pair.folder / f"log{rank}").exists() for rank in range(2)):
        assert all(rank.is_alive() for rank in pair.ranks)
        time.sleep(0.02)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    time.sleep(1)  # so that the other, which looks every half second whether this one has ended, waits for it
    second.terminate()
    assert pair.code(1) == 128 + signal.SIGTERM
    os.kill(first.pid, signal.SIGCONT)
    assert pair.code(0) == 1


def test_a_killed_rank_ends_the_other(pair: Pair) -> None:
    pair.start([*LINE, *LONG], [*LINE, *LONG])
    pair.is_under_way()
    pair.ranks[1].kill()
    assert pair.code(0) == 1
    said = [line for line in pair.said(0).splitlines() if line.startswith("error: ")]
    assert said
    assert all("another rank has ended" in line for line in said)
    assert "Traceback" not in pair.said(0)
    assert list(pair.outputs.iterdir()) == []


@pytest.mark.whole
def test_sigterm_does_not_hold_up_a_rank_that_leaves(pair: Pair) -> None:
    """As torchrun sends it where another rank was killed."""
    pair.start([*LINE, *LONG], [*LINE, *LONG])
    pair.is_under_way()
    pair.ranks[1].kill()
    while "another rank has ended" not in pair.said(0):
        assert pair.ranks[0].is_alive(), pair.said(0)
        time.sleep(0.02)
    pair.ranks[0].terminate()
    assert pair.code(0) == 1
    assert "Traceback" not in pair.said(0)


def on_a_lost_terminal(kind: str, arguments: list[str]) -> None:
    """Be the command, alone, with standard output and standard error that take nothing."""
    if kind == "closed":
        os.close(1)
        os.close(2)
    else:
        full = os.open("/dev/full", os.O_WRONLY)
        reading, broken = os.pipe()
        os.close(reading)
        for number in (1, 2):
            os.dup2(full if kind == "full" else broken, number)
    be_rank({}, arguments, "")


@pytest.mark.parametrize(
    ("kind", "calibrated"), [("full", False), ("full", True), ("broken pipe", True), ("closed", False)]
)
@pytest.mark.sampled(1)
def test_a_lost_terminal_does_not_change_the_work(
    tmp_path: Path, model_folder: Path, text_file: Path, kind: str, calibrated: bool
) -> None:
    line = ["prune", str(model_folder), "--output", str(tmp_path / "out"), "--sparsity", "0.3"]
    if calibrated:
        line += ["--calibration", str(text_file), "--samples", "3", "--own-words", "0", "--sequence-length", "16"]
    process = CONTEXT.Process(target=on_a_lost_terminal, args=(kind, line))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    if not calibrated:
        run_prune_job(PruneJob(model=str(model_folder), output=str(tmp_path / "alone"), sparsity=0.3))
        assert contents(tmp_path / "alone") == contents(tmp_path / "out")
    assert (tmp_path / "out" / "report.json").is_file()


def test_inspect_fails_where_nobody_can_read_it(model_folder: Path) -> None:
    process = CONTEXT.Process(target=on_a_lost_terminal, args=("full", ["inspect", str(model_folder), "--json"]))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 1


ABORTS = """
import atexit, os, sys
from distprune.cli.main import run
atexit.register(os.abort)  # as threads do that the interpreter's end has surprised
sys.argv = ["distprune", *sys.argv[1:]]
run()
"""


@pytest.mark.whole
def test_an_abort_at_the_end_of_the_interpreter_does_not_change_the_exit_code(
    tmp_path: Path, model_folder: Path
) -> None:
    line = ["prune", str(model_folder), "--output", str(tmp_path / "out"), "--sparsity", "0.3"]
    done = finish([sys.executable, "-c", ABORTS, *line])
    assert done.returncode == 0, done.stderr
    assert "30.0 % of 5,760 prunable weights" in done.stdout  # nothing that was printed is lost
