"""Where ranks tell each other that they end, so that nobody waits for one that is gone.

The store lies with torchrun's agent or, under other launchers, on the first rank. A thread on every rank looks
there: when a rank has ended early, or the store is gone, this one ends too, even if it hangs in a collective.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from distprune.cli.launchers import Start

_GRACE = 5.0  # seconds for a rank to end by itself, once another has or a signal has come
_POLL = 0.5  # seconds
_GOODBYE = 2.0  # seconds for all to say that they end too
_SILENCE = 8.0  # seconds without a sign of life from any rank that is not done: those ranks are gone
_HERE, _BEATS, _DONE, _ENDED, _FIRST_HAS_ENDED = (
    f"distprune/{key}" for key in ("here", "beats", "done", "ended", "first ended")
)


class _Ending:
    """Ends the process, by ``end``, so long after it is first asked to; its thread waits from the beginning.

    Raises:
        RuntimeError: the thread cannot start.
    """

    def __init__(self, end: Callable[[int], object]) -> None:
        self._end = end
        self._asked: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, seconds: float, code: int) -> None:
        self._asked.put((seconds, code))

    def _run(self) -> None:
        seconds, code = self._asked.get()
        time.sleep(seconds)
        self._end(code)


class Meeting:
    """All ranks of a launch. Every rank must make one; waits for the first rank's, not for the others'."""

    def __init__(self, start: Start, timeout: timedelta) -> None:
        self._rank, self._size = start.rank, start.size
        self._deadline = time.monotonic() + timeout.total_seconds()  # for all to have come
        with_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        is_host = start.rank == 0 and not with_torchrun
        self.store = TCPStore(start.host, start.port, start.size, is_host, timeout, wait_for_workers=False)
        # A rank that waits in a store keeps it locked, also where only its host stands still: torchrun's does not.
        self._store_of_others = self.store.clone()  # type: ignore[attr-defined]
        self._store_of_signals = self._store_of_others if with_torchrun else self._store_of_others.clone()
        self.store.add(_HERE, 1)
        self._is_over = False
        self._grace: _Ending | None = None
        self._farewell: _Ending | None = None

    def attend(self) -> None:
        """End this process within seconds when another rank has ended early, or a signal has come. Returns at once."""
        self._grace, self._farewell = _Ending(self._end_unless_over), _Ending(os._exit)
        heard, signalled = socket.socketpair()
        signalled.setblocking(False)
        signal.set_wakeup_fd(signalled.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._attend_signals, args=(heard,), daemon=True).start()
        threading.Thread(target=self._attend_others, daemon=True).start()

    def _attend_signals(self, heard: socket.socket) -> None:
        self._end_soon(128 + heard.recv(1)[0])
        with suppress(RuntimeError):
            self._store_of_signals.set(_ENDED, "")

    def _attend_others(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and the first rank with it
            while not self._is_over and not self._store_of_others.check([_ENDED]):
                self._store_of_others.add(_BEATS, 1)
                time.sleep(_POLL)
        self._end_soon(1)

    def _end_soon(self, code: int) -> None:
        """End the process after a grace, if it has not ended by itself, even if it hangs in a collective."""
        if self._grace is not None:
            self._grace.ask(_GRACE, code)

    def _end_unless_over(self, code: int) -> None:
        if not self._is_over:
            if self._rank == 0 and code == 1:
                os.write(2, b"error: another rank has ended, and so does this one\n")
            os._exit(code)

    def finish(self) -> None:
        """Say that this rank has done its work.

        The first rank, which may hold the store, waits for the others as long as one of them gives signs of life.
        """
        self._is_over = True
        with suppress(RuntimeError):
            self.store.add(_DONE, 1)
            before, beats = -1, 0
            while self._rank == 0 and before != beats:
                before = beats
                if self._until(lambda: self._count(_DONE) == self._size, _SILENCE):
                    break
                beats = self._count(_BEATS)

    def leave(self, code: int) -> bool:
        """Tell the others that this rank ends early; return whether it has to say why, or the first rank has.

        If the store does not answer, the process ends with ``code``.
        """
        self._is_over = True
        to_come = max(self._deadline - time.monotonic(), 0.0)
        longest = _GOODBYE if self._rank else to_come + _GOODBYE
        with suppress(RuntimeError):  # a thread that cannot start: then the store's timeout ends the wait
            self._farewell = self._farewell or _Ending(os._exit)
            self._farewell.ask(longest + _GRACE, code)
        try:
            if self._rank == 0:
                self.store.set(_FIRST_HAS_ENDED, "")
            self.store.set(_ENDED, "")
            if self._rank > 0:
                first_has_ended = self._until(lambda: self.store.check([_FIRST_HAS_ENDED]), _GOODBYE)
                self.store.add(_DONE, 1)
                return not first_has_ended
            # A rank that comes later would find no store, and wait for one.
            self._until(lambda: self._count(_HERE) == self._size, to_come)
            self._until(lambda: self._count(_DONE) == self._size - 1, _GOODBYE)
        except RuntimeError:  # the store is gone, and the first rank with it
            pass
        return True

    def _count(self, key: str) -> int:
        return int(self.store.add(key, 0))

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not (met := condition()) and time.monotonic() < deadline:
            time.sleep(_POLL / 10)
        return met
