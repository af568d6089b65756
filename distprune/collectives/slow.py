"""Slow local work on every rank, with a sign of life every second."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch

from distprune.collectives.agree import sum_together, together
from distprune.collectives.base import Communicator

_BEAT = 1.0  # seconds between two rounds


def work_together(comm: Communicator, work: Callable[[], object]) -> None:
    """Do ``work`` on every rank, in a thread where there are several, however long it takes.

    Ranks that are done do not wait in one round for those that are not: no rank is taken for lost because a disk is
    slow. ``work`` must not communicate. Every rank must call it: a round of 16 bytes a second, and one of 64.

    Raises:
        Exception: on every rank, once all are done: what ``work`` raised on one, or that it cannot start a thread.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # whatever ends a thread ends it without a word
            raised.append(error)

    thread = Thread(target=run, daemon=True)
    if comm.size == 1:
        run()
    else:
        try:
            thread.start()
        except BaseException as error:  # the others have begun: they hear of it when they are done
            raised.append(error)

    def wait(num_working: torch.Tensor) -> None:
        if thread.is_alive():
            thread.join(_BEAT)
        num_working.fill_(thread.is_alive())

    while int(sum_together(comm, (1,), wait)):
        pass
    with together(comm):
        if raised:
            raise raised[0]
