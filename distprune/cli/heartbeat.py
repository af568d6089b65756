"""A word now and then from a job, so that nobody takes a long stage for one that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Heartbeat:
    """Has ``say`` called when nothing was said for ``interval`` seconds, between :meth:`start` and :meth:`stop`."""

    def __init__(self, say: Callable[[str], None], interval: float, now: Callable[[], float] = time.monotonic) -> None:
        self._say, self._interval, self._now = say, interval, now
        self._started = self._began = self._said_at = now()
        self.stage, self._how_far = "starting", ""
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin, in a thread of its own."""
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Say nothing more."""
        self._ended.set()

    def begin(self, stage: str) -> None:
        """Note that a stage begins."""
        self.stage, self._how_far, self._began = stage, "", self._now()

    def at(self, how_far: str, stage: str | None = None) -> None:
        """Note how far the stage is, which may be another one than the last."""
        if stage not in (None, self.stage):
            self.begin(str(stage))
        self._how_far = how_far

    def said(self) -> None:
        """Note that something has been said."""
        self._said_at = self._now()

    def beat(self) -> float:
        """Say what is done, how far and for how long, if it is time; return the seconds until it is again."""
        now = self._now()
        if (left := self._said_at + self._interval - now) > 0:
            return left
        how_far = f", {self._how_far}" if self._how_far else ""
        self._say(f"{self.stage}{how_far}: {_clock(now - self._began)}, {_clock(now - self._started)} in all")
        self._said_at = now
        return self._interval

    def _run(self) -> None:
        while not self._ended.wait(self.beat()):
            pass


def _clock(seconds: float) -> str:
    """Return hours, minutes and seconds."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"
