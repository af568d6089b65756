"""This process among the ranks of its launch, from the meeting of all to the end of each."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from distprune.cli.launchers import Start, ask_mpi, detect, likely_rank
from distprune.cli.meeting import Meeting

_TO_SAY_GOODBYE = timedelta(seconds=20)  # how long a rank that does not come tries to tell the first one


class Launch:
    """The ranks that were started together; this process is number ``rank`` of them."""

    def __init__(self) -> None:
        self.rank = likely_rank(os.environ)
        self._start: Start | None = None
        self._meeting: Meeting | None = None
        self._waited_in_vain = False

    def start(self, device: str, timeout_seconds: float) -> torch.device:
        """Meet the others, start the process group the launcher calls for, and return this rank's device.

        From then on SIGTERM unwinds the stack, so that what is half written is removed.

        Args:
            device: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA where there is a GPU.
            timeout_seconds: how long a rank waits for the others before it gives up.

        Raises:
            ValueError: CUDA is asked for and not there, or the launcher's variables are broken.
            ImportError: started by an MPI launcher without mpi4py.
            TimeoutError: the others have not come in time.
        """
        start = self._resolve()
        chosen = _device(device, start.local_rank)
        _share_cores(start.local_size)
        if start.size == 1:
            signal.signal(signal.SIGTERM, _unwind)
            return chosen
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        else:
            schedule_as_batch()
            use_huge_pages()
        timeout = timedelta(seconds=timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
        try:
            self._meeting = Meeting(start, timeout)
            signal.signal(signal.SIGTERM, _unwind)
            self._meeting.attend()
            dist.init_process_group(
                backend, store=self._meeting.store, rank=start.rank, world_size=start.size, timeout=timeout
            )
        except dist.DistError as error:
            self._waited_in_vain = True
            raise TimeoutError(
                f"not all {start.size} ranks came within {timeout_seconds:g} seconds: {error}"
            ) from error
        return chosen

    def finish(self) -> None:
        """Say that this rank has done its work, and take the group down. A signal no longer changes the exit code."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._meeting is not None:
            self._meeting.finish()
            with suppress(Exception):
                dist.destroy_process_group()

    def leave(self, code: int) -> bool:
        """Tell the others that this rank ends, with ``code``, before its work is done.

        Returns whether it has to say why: where the first rank ends too, that one does. SIGTERM, which torchrun sends
        at once, no longer unwinds anything: it would leave the process to end with its timers.
        """
        try:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, lambda *_: os._exit(code))
            if self._meeting is None:
                start = self._start or self._resolve()
                if start.size == 1 or self._waited_in_vain:
                    return True
                self._meeting = Meeting(start, _TO_SAY_GOODBYE)
            return self._meeting.leave(code)
        except Exception:  # nobody to tell, or no way
            return True

    def _resolve(self) -> Start:
        start = detect(os.environ)
        self._start = ask_mpi() if start.launcher == "mpi" else start
        self.rank = self._start.rank
        return self._start


def _unwind(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _device(device: str, local_rank: int) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, but there is no CUDA device")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _share_cores(local_size: int) -> None:
    """Give every rank of a node its part of the cores, unless the user has said otherwise."""
    if local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // local_size))  # until now: one for every core


def schedule_as_batch() -> None:
    """Have Linux run this thread, and those it starts from now on, as parts of one long computation.

    Woken threads then wait for the running one to sleep. Otherwise gloo's and the one that computes keep
    interrupting each other where they share a core, and every tenth round takes milliseconds. Elsewhere, and
    where the user has chosen a policy, nothing is changed.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def use_huge_pages() -> None:
    """Have PyTorch ask Linux for huge pages for CPU tensors of 2 MiB and more, unless the user has chosen.

    Buffers of gathered weights come and go, and every page of a new one costs time. To be called before the first
    tensor is made: that is when PyTorch reads its variable. Kernels that have none, or grant none, take no notice.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
