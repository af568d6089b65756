"""Ranks that end before the others, started by hand with nobody to look after them; and a terminal that is gone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from distprune.jobs import PruneJob, run_prune_job
from tests.cli.test_launches import finish
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
        self.folder, self.outputs = folder, folder / "outputs"
        (folder / "long.txt").write_text(text.read_text() * 100)
        self.places = {"model": model, "pruned": folder / "pruned", "text": text}
        self.places |= {"out": self.outputs / "out", "long": folder / "long.txt"}
        self.ranks: list[BaseProcess] = []
        self.variables = by_hand(2)

    def start(self, line: list[str], *be: Callable[..., None]) -> None:
        self.variables = by_hand(2)
        for rank, be_one in enumerate(be or (be_rank, be_rank)):
            self.start_one(rank, line, be_one)

    def start_one(self, rank: int, line: list[str], be: Callable[..., None] = be_rank) -> BaseProcess:
        arguments = [word.format(**self.places) for word in line]
        log = str(self.folder / f"log{rank}")
        self.ranks.append(CONTEXT.Process(target=be, args=(self.variables[rank], arguments, log)))
        self.ranks[-1].start()
        return self.ranks[-1]

    def is_under_way(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not list(self.outputs.glob(".out.unfinished/")):
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


def test_a_rank_that_never_comes(pair: Pair) -> None:
    process = pair.start_one(0, [*LINE[:-1], "1"])
    process.join(SECONDS)
    assert process.exitcode == 1
    assert "not all 2 ranks came within 1 seconds" in pair.said(0)


CALIBRATED = ["--calibration", "{text}", "--samples", "2", "--own-words", "0", "--sequence-length", "16"]
EVALUATED = ["--eval", "{text}", "--eval-tokens", "64", "--eval-length", "16"]
TUNED = ["finetune", "{pruned}", "--data", "{text}", "--steps", "2", "--batch-size", "2", "--sequence-length", "16"]
TUNED += ["--output", "{out}", "--timeout", "300"]
# By what fails: the command, and whether both ranks come to know why.
FAILING: dict[str, tuple[list[str], bool]] = {
    "evaluation": ([*LINE, *EVALUATED], True),
    "training forward": (TUNED, False),
    "training backward": (TUNED, False),
    "evaluation of what is calibrated": ([*LINE, *CALIBRATED, *EVALUATED], True),
    "allocation": ([*LINE, *CALIBRATED, "--allocation", "gradients"], True),
    "evaluation of what is trained": ([*TUNED, *EVALUATED], True),
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
    pair.start(line, be_rank, partial(be_rank_that_fails, fails))
    assert (pair.code(0), pair.code(1)) == (1, 1)
    cause = "out of memory while" if is_told else "out of memory while training"
    assert cause in pair.said(0 if is_told else 1)
    assert "Traceback" not in pair.said(0) + pair.said(1)
    assert "rank 1" in pair.said(0) if is_told else "another rank has ended" in pair.said(0)
    assert not (pair.outputs / "out").exists()


def test_a_mistake_of_all_ranks_is_said_by_the_first(pair: Pair) -> None:
    for number, line in enumerate(([*LINE, "--loud"], ["prune", "nowhere", *LINE[2:]])):
        pair.start(line)
        assert (pair.code(2 * number), pair.code(2 * number + 1)) == (2 - number, 2 - number)
    assert "No such option: --loud" in pair.said(0)
    assert pair.said(0).count("error: there is no model directory") == 1


def test_a_killed_rank_ends_the_other(pair: Pair) -> None:
    pair.start([*LINE, *LONG])
    pair.is_under_way()
    pair.ranks[1].kill()
    assert pair.code(0) == 1
    said = [line for line in pair.said(0).splitlines() if line.startswith("error: ")]
    assert said
    assert all("another rank has ended" in line for line in said)
    assert "Traceback" not in pair.said(0)
    assert list(pair.outputs.iterdir()) == []


@pytest.mark.parametrize("leaving", [0, only_whole(1)])
def test_sigterm_ends_a_rank_that_waits_for_the_other(pair: Pair, leaving: int) -> None:
    pair.start([*LINE, *LONG])
    pair.is_under_way()
    other = pair.ranks[1 - leaving].pid
    assert other is not None
    os.kill(other, signal.SIGSTOP)
    time.sleep(1)  # so that the one that is left waits inside a collective, where no Python code runs
    pair.ranks[leaving].terminate()
    assert pair.code(leaving) == 128 + signal.SIGTERM
    assert not (pair.outputs / "out").exists()


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


@pytest.mark.parametrize("kind", ["broken pipe", only_whole("full"), only_whole("closed")])
def test_a_lost_terminal_does_not_change_the_work(tmp_path: Path, model_folder: Path, kind: str) -> None:
    line = ["prune", str(model_folder), "--output", str(tmp_path / "out"), "--sparsity", "0.3"]
    process = CONTEXT.Process(target=on_a_lost_terminal, args=(kind, line))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    run_prune_job(PruneJob(model=str(model_folder), output=str(tmp_path / "alone"), sparsity=0.3))
    assert contents(tmp_path / "alone") == contents(tmp_path / "out")


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
