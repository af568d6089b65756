"""What a person sees: progress on standard error, a summary on standard output; the first rank only."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from typing_extensions import override

from distprune.checkpoint.optional_packages import import_extra
from distprune.formatting import printable
from distprune.jobs import Watcher
from distprune.jobs.picture import mean_error

_IN_A_LOG = {"mininterval": 30, "delay": 30, "ncols": 80, "ascii": True}  # of tqdm: a line in as many seconds


class Display(Watcher):
    """Shows things on one rank, and nothing on the others. ``stage``: what the job does now."""

    def __init__(self, *, visible: bool) -> None:
        self.stage = "starting"
        self._visible, self._is_terminal = visible, sys.stderr.isatty()
        self._tqdm = import_extra("tqdm", "hf").tqdm
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    @override
    def say(self, text: str) -> None:
        if self._visible:
            write = self._tqdm.write if self._is_terminal else print  # in a log tqdm would draw a bar that is not due
            write(printable(text), file=sys.stderr)

    @override
    def begin(self, stage: str) -> None:
        self.stage = stage

    @override
    def progress(self, stage: str, unit: str, done: int, total: int) -> None:
        """Draw a bar; in a log, of a stage that takes long, a line now and then."""
        self.stage = stage
        if not self._visible:
            return
        if self._bar is None or self._bar.desc != stage:
            self.close()
            settings = {} if self._is_terminal else _IN_A_LOG
            units = {"unit": unit, "unit_scale": unit == "bytes"}
            self._bar = self._tqdm(desc=stage, leave=False, initial=done, total=total, **units, **settings)
        self._bar.update(done - self._bar.n)

    @override
    def block(self, report: Mapping[str, Any], num_blocks: int) -> None:
        error, num_done = mean_error(report["layers"]), report["index"] + 1
        shown = "none" if error is None else f"{error:.4f}"
        self.say(f"pruned {report['name']}, {num_done} of {num_blocks} blocks: relative error {shown}")
        self.progress(self.stage, "blocks", num_done, num_blocks)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def show(self, lines: Sequence[str]) -> None:
        """Print a summary."""
        if self._visible:
            sys.stdout.write(printable("\n".join(lines)) + "\n")
