"""Ranks with the variables that a launcher sets, as forks of a process that has everything imported."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path

import torch

from distprune.cli.main import run
from tests.worlds import CONTEXT

__all__ = ["be_rank", "by_hand", "run_script"]

SECONDS = 240


def by_hand(num_ranks: int) -> list[dict[str, str]]:
    """Return the variables that torchrun would set for each of so many ranks, with a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = str(num_ranks)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _begin(variables: dict[str, str], output: str, errors: str) -> None:
    for number, name in ((1, output), (2, errors)):
        if name:
            os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    os.environ.update(variables)
    torch.set_num_threads(1)


def be_rank(variables: dict[str, str], arguments: list[str], log: str) -> None:
    """Be one rank of the command, which says everything to ``log``, if that is a name."""
    _begin(variables, log, log)
    sys.argv = ["distprune", *arguments]
    run()


def _be_script(variables: dict[str, str], command: list[str], folder: str) -> None:
    os.chdir(folder)
    _begin(variables, "output.txt", "errors.txt")
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    sys.stdout.flush()


def run_script(num_ranks: int, folder: Path, *command: str) -> str:
    """Run a script with its arguments in ``folder`` on so many ranks, 0: no launcher, and return what it printed."""
    output, errors = folder / "output.txt", folder / "errors.txt"
    for log in (output, errors):
        log.write_text("")
    started = [
        CONTEXT.Process(target=_be_script, args=(own, list(command), str(folder)))
        for own in (by_hand(num_ranks) or [{}])
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(SECONDS)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert not any(codes), f"{codes}: {errors.read_text()}"
    return output.read_text()
