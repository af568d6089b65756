"""What a job tells while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from distprune.collectives.agree import together
from distprune.collectives.base import Communicator


class Watcher:
    """Is told, on every rank, how a job goes. This one is silent: override what you want to hear.

    What a method raises on one rank ends the job: a RuntimeError on every rank. ``KeyboardInterrupt`` and
    ``SystemExit`` end that rank at once, and the others in their next collective.
    """

    def say(self, text: str) -> None:
        """Hear one line of text."""

    def begin(self, stage: str) -> None:
        """Hear that a stage begins."""

    def progress(self, stage: str, unit: str, done: int, total: int) -> None:
        """Hear that ``done`` of ``total`` units of a stage are done: ("loading", "bytes", 4096, 8192)."""

    def block(self, report: Mapping[str, Any], num_blocks: int) -> None:
        """Hear that a decoder block is pruned and on the disk; ``report`` is its part of the job's report."""


class Reporter:
    """Calls a watcher between collectives. What it raises on one rank waits for :meth:`check`, which raises on all."""

    def __init__(self, watcher: Watcher, comm: Communicator) -> None:
        self._watcher, self._comm = watcher, comm
        self._error: Exception | None = None

    def say(self, text: str) -> None:
        self._call(self._watcher.say, text)

    def begin(self, stage: str) -> None:
        self._call(self._watcher.begin, stage)

    def block(self, report: Mapping[str, Any], num_blocks: int) -> None:
        self._call(self._watcher.block, report, num_blocks)

    @contextmanager
    def stage(self, name: str, unit: str) -> Iterator[Callable[[int, int], None]]:
        """Yield a callback (done, total) for the stage. Every rank must enter it: one round at its end."""
        self.begin(name)
        yield partial(self._call, self._watcher.progress, name, unit)
        self.check()

    def check(self) -> None:
        """Raise, on every rank, what the watcher has raised on one. Every rank must call it: one round."""
        with together(self._comm):
            self.check_here()

    def check_here(self) -> None:
        """Raise what the watcher has raised on this rank. Local."""
        if self._error is not None:
            raise RuntimeError(f"the watcher failed: {self._error!r}") from self._error

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        if self._error is None:
            try:
                method(*arguments)
            except Exception as error:
                self._error = error
