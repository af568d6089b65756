"""Many ranks in a test: as threads (cheap, most tests), or as a pool of gloo processes kept alive."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import re
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from distprune.shards import device

__all__ = ["CONTEXT", "ProcessPool", "RankError", "all_raise", "drawing", "run_threads"]

# New processes are forks of one that has everything imported and nothing running yet.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])

device._CPU_BFLOAT16.clear()  # what is fitted is the same but for rounding on every CPU, and on the simulated device


NOBODYS_SEED = 0x5EED


class RankError(Exception):
    """What a rank raised, labelled with the rank; ``error`` is the exception itself where it could travel."""

    def __init__(self, rank: int, error: BaseException | None, text: str) -> None:
        super().__init__(f"rank {rank}:\n{text}")
        self.rank = rank
        self.error = error


_drawing = threading.RLock()


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Make what is drawn within the same on every rank, also where ranks are threads and share the random state.

    One thread at a time is within, and it leaves the state as it was.
    """
    with _drawing, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def run_threads(
    world_size: int, fn: Callable[..., Any], *args: Any, catch: bool = False, draws: bool = False
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``world_size`` threads with a process group, and return the results by rank.

    With ``catch``, a rank's exception is its result; without, the first one is raised. Threads share the
    random state, so what several draw from it depends on who comes first: it is an error unless within
    :func:`drawing`, or with ``draws``, for code under test that is meant to draw.
    """
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size

    def one(rank: int, store: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = fn(rank, *args)
        except BaseException as error:
            errors[rank] = error
            if not catch:
                threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    if world_size > 1 and not draws:
        torch.manual_seed(NOBODYS_SEED)  # what seeds itself the same each time would be seen the first time alone
    before = torch.get_rng_state()
    c10d: Any = torch._C._distributed_c10d
    c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reduce = _reduce  # torch's has none
    try:
        store = torch._C._distributed_c10d.HashStore()
        threads = [threading.Thread(target=one, args=(rank, store), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(timeout=120)
            if thread.is_alive():
                raise TimeoutError(f"rank {rank} of {world_size} hangs")
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        c10d._set_thread_isolation_mode(False)
    raised = [error for error in errors if error is not None]
    # Ranks that were waiting for the one that failed end with SystemExit; its own error says why.
    raised.sort(key=lambda error: isinstance(error, SystemExit))
    if raised and not catch:
        raise raised[0]
    if world_size > 1 and not draws:
        assert torch.equal(torch.get_rng_state(), before), "ranks drew from the random state that they share"
    return [error if error is not None else result for error, result in zip(errors, results, strict=True)]


def all_raise(
    world_size: int, fn: Callable[..., Any], *args: Any, match: str, kind: type[Exception] = Exception
) -> list[Any]:
    """Check that every rank raises an error of ``kind`` whose words ``match``, and return the errors by rank."""
    errors = run_threads(world_size, fn, *args, catch=True)
    for rank, error in enumerate(errors):
        assert isinstance(error, kind), f"rank {rank} ended with {error!r}"
        assert re.search(match, str(error)), error
    return errors


def _reduce(group: Any, tensors: list[torch.Tensor], options: Any) -> Any:
    summed = [tensor.clone() for tensor in tensors]
    work = group.allreduce(summed)
    for tensor, total in zip(tensors, summed, strict=True):
        tensor.copy_(total if group.rank() == options.rootRank else torch.full_like(total, -1))
    return work


class ProcessPool:
    """Worker processes that outlive a test; every call makes a fresh group of the first few of them.

    ``begin`` is called in each of them first, ``backend`` is the group's.
    """

    def __init__(self, num_workers: int, begin: Callable[[], object] | None = None, backend: str = "gloo") -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._num_runs = 0
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num_workers):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(theirs, begin, backend), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(rank, *args)`` on ``world_size`` ranks and return the results by rank.

        Raises:
            RankError: the first rank's that failed.
        """
        self._num_runs += 1
        store = str(Path(self._folder.name) / f"store{self._num_runs}")
        for rank in range(world_size):
            self._pipes[rank].send((fn, args, rank, world_size, store))
        answers = []
        for rank in range(world_size):
            if not self._pipes[rank].poll(240):
                raise TimeoutError(f"rank {rank} of {world_size} hangs")
            answers.append(self._pipes[rank].recv())
        for rank, (ok, value, text) in enumerate(answers):
            if not ok:
                raise RankError(rank, value, text)
        return [value for _, value, _ in answers]

    def all_say(self, world_size: int, fn: Callable[..., str], *args: Any, match: str) -> None:
        """Check that the text that every rank returns matches."""
        for said in self.run(world_size, fn, *args):
            assert re.search(match, said), said

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, begin: Callable[[], object] | None, backend: str) -> None:
    torch.set_num_threads(1)
    if begin is not None:
        begin()
    gc.freeze()  # what was imported stays, and need not be looked at
    while True:
        fn, args, rank, world_size, store_path = pipe.recv()
        try:
            store = torch._C._distributed_c10d.FileStore(store_path, world_size)
            timeout = timedelta(seconds=120)
            dist.init_process_group(backend, rank=rank, world_size=world_size, store=store, timeout=timeout)
            torch.manual_seed(NOBODYS_SEED + rank)  # a test that fails, fails again
            pipe.send((True, fn(rank, *args), ""))
        except Exception as error:
            _send_error(pipe, error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # DTensor remembers meshes that equal those of the next run, with groups that are gone.
            _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
            # Models are cycles that keep their groups, and gloo's threads with them.
            gc.collect()


def _send_error(pipe: Connection, error: Exception) -> None:
    text = traceback.format_exc()
    try:
        pipe.send((False, error, text))
    except Exception:  # an exception that cannot be pickled travels as its text
        pipe.send((False, None, text))


@contextlib.contextmanager
def process_pool(
    num_workers: int, begin: Callable[[], object] | None = None, backend: str = "gloo"
) -> Iterator[ProcessPool]:
    """Yield a pool and end its processes afterwards."""
    pool = ProcessPool(num_workers, begin, backend)
    try:
        yield pool
    finally:
        pool.close()
