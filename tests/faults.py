"""An error at every place of a call where one rank alone can meet one, and what the other ranks then do.

Nouns: a *place* is a line of the library, outside its collectives, that calls what can fail on one rank alone while
nothing is communicated: torch's functions, code that is neither torch's nor the library's (numpy, files, a user's), and
what starts a thread, within a collective too. A *gap* is the stretch between two collectives; gap i comes after i of
them. Where i is odd, the error is a panic, as extensions have it. Ranks are threads, and the process group is watched:
where all ranks that still run wait for one that has ended, they hang, and are let go.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from typing_extensions import override

import distprune
from distprune.collectives import slow
from distprune.shards import layouts
from tests.worlds import run_threads

__all__ = ["Place", "Tried", "faults"]

Tried: TypeAlias = Counter[tuple[int | None, str]]  # by rank (None: any) and line: in how many gaps it met an error

_LIBRARY = str(Path(distprune.__file__).parent) + "/"
_COLLECTIVES = _LIBRARY + "collectives/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_STDLIB = sysconfig.get_path("stdlib") + "/"
_PACKAGES = sysconfig.get_path("purelib") + "/"
# Of the standard library what works on files (metadata of packages are some), and json, which meets what a user passes.
_FALLIBLE = tuple(_STDLIB + name for name in ("pathlib", "json/", "shutil", "tempfile", "os.py", "importlib/metadata/"))
# They say what is there already, or give a part of it another shape.
_READS = {
    "device",
    "__get__",
    "__getitem__",
    "__len__",
    "__bool__",
    "__int__",
    "__float__",
    "dim",
    "detach",
    "element_size",
}
_READS |= {"is_complex", "is_contiguous", "is_floating_point", "item", "numel", "numpy", "size", "split", "stride"}
_READS |= {"t", "tolist", "unbind", "view", "diagonal", "is_inference", "_set_grad_enabled"}
# They work on what all ranks hold alike, sums over ranks of 1 MiB at most and dtypes, and say which round comes next,
# so they cannot stand inside one. What one rank cannot do there, none can.
_AGREED = {
    "oneshot/allocation.py": ("below_one_threshold", "whole_rows_of"),
    "selection/radix.py": ("select_lowest", "_narrowed", "_check", "_thresholds", "_LocalElements.__init__"),
    "selection/order.py": ("Order.values",),
}
_TEXT = "an injected error"
_START_OF_A_THREAD = threading.Thread.start.__code__


class _Panic(BaseException):
    """As extensions in Rust raise it."""


@dataclass(frozen=True, order=True)
class Place:
    gap: int
    line: str  # "file:number"
    callee: str


class _Ranks:
    """Who waits in which collective, and who has ended."""

    def __init__(self, num_ranks: int) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[int, Any] = {}
        self.arrived: dict[int, int] = {}
        self.running = set(range(num_ranks))
        self.num_joined = [0] * num_ranks
        self.hang = False

    def joins(self, rank: int, collective: Any) -> None:
        with self.lock:
            self.num_joined[rank] += 1
            key = id(collective)
            self.waiting[rank] = collective
            self.arrived[key] = self.arrived.get(key, 0) + 1
            if self.arrived[key] == collective._world_size:
                del self.arrived[key]
                self.waiting = {r: other for r, other in self.waiting.items() if other is not collective}
            self._let_go_if_stuck()

    def ends(self, rank: int) -> None:
        with self.lock:
            self.running.discard(rank)
            self._let_go_if_stuck()

    def _let_go_if_stuck(self) -> None:
        if self.running and self.running <= self.waiting.keys():
            self.let_go()

    def let_go(self) -> None:
        from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

        self.hang = True
        ProcessLocalGroup.exception_handle(None)


@contextmanager
def _watched(ranks: _Ranks) -> Iterator[None]:
    from torch.testing._internal.distributed.multi_threaded_pg import Collective

    join = Collective.join

    def watched(self: Any, rank: int, data: Any) -> Any:
        ranks.joins(_rank.number, self)
        try:
            return join(self, rank, data)
        except Exception:  # ranks met in different collectives
            ranks.let_go()
            raise

    Collective.join = watched
    beat, slow._BEAT = slow._BEAT, 600.0  # else the number of rounds would follow from how long it takes
    try:
        yield
    finally:
        Collective.join, slow._BEAT = join, beat


_rank = threading.local()


class _Tracer(TorchFunctionMode):
    """Note every place, or raise at ``target``."""

    def __init__(self, num_joined: Callable[[], int], target: Place | None) -> None:
        super().__init__()
        self.num_joined = num_joined
        self.target = target
        self.places: dict[tuple[int, str], Place] = {}
        self._under_way: list[tuple[FrameType, Place]] = []
        self.raised = False

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        frame = _of_the_library(sys._getframe(1))
        written = name.endswith("_") and not name.startswith("_")  # into memory that is there
        if name in _READS or written or frame is None or self._is_early():
            return func(*args, **(kwargs or {}))
        place = self._place(frame, name)
        self._meet(place)
        found = func(*args, **(kwargs or {}))
        self._passed(place)
        return found

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is _START_OF_A_THREAD and not self._is_early():
            caller = frame.f_back
            while caller is not None and not _is_place(caller):
                caller = caller.f_back
            if caller is not None:
                place = self._place(caller, "Thread.start")
                self._under_way.append((frame, place))
                self._meet(place)
            return
        if event == "return" and self._under_way and self._under_way[-1][0] is frame:
            self._passed(self._under_way.pop()[1])
        if event != "call" or frame.f_back is None or not _is_place(frame.f_back) or self._is_early():
            return
        file = frame.f_code.co_filename
        if file.startswith((_LIBRARY, _TORCH, __file__, "<")):
            return
        if file.startswith(_STDLIB) and not file.startswith((_PACKAGES, *_FALLIBLE)):
            return
        if frame.f_code.co_qualname.startswith(("PurePath.", "Path.__new__")):
            return
        place = self._place(frame.f_back, frame.f_code.co_qualname)
        self._under_way.append((frame, place))
        self._meet(place)

    def _place(self, frame: FrameType, callee: str) -> Place:
        line = f"{frame.f_code.co_filename.removeprefix(_LIBRARY)}:{frame.f_lineno}"
        return Place(self.num_joined(), line, callee)

    def _is_early(self) -> bool:
        return self.target is not None and self.num_joined() < self.target.gap

    def _meet(self, place: Place) -> None:
        if place == self.target and not self.raised:
            self.raised = True
            raise (MemoryError, _Panic)[place.gap % 2](_TEXT)

    def _passed(self, place: Place) -> None:
        if self.num_joined() == place.gap:  # nothing was communicated meanwhile
            self.places.setdefault((place.gap, place.line), place)


def _is_place(frame: FrameType) -> bool:
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    if not file.startswith(_LIBRARY) or file.startswith(_COLLECTIVES):
        return False
    return name not in _AGREED.get(file.removeprefix(_LIBRARY), ())


def _of_the_library(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not frame.f_code.co_filename.startswith(_LIBRARY):
        if frame.f_code.co_filename == dist.distributed_c10d.__file__:  # a part of a collective of torch's
            return None
        frame = frame.f_back
    return frame if frame is not None and _is_place(frame) else None


@dataclass
class _Run:
    results: list[Any]
    ranks: _Ranks
    num_gaps: int
    places: list[Place]
    raised: bool


def _run(num_ranks: int, call: Callable[[int], Callable[[], Any]], traced: int, target: Place | None) -> _Run:
    ranks, tracers = _Ranks(num_ranks), []
    layouts._places.clear()  # what calls keep for later ones is found anew in each

    def on_rank(rank: int) -> Any:
        _rank.number = rank
        try:
            of_rank = call(rank)
            if rank != traced:
                return of_rank()
            before = ranks.num_joined[rank]
            tracer = _Tracer(lambda: ranks.num_joined[rank] - before, target)
            tracers.append(tracer)
            with tracer:
                sys.setprofile(tracer.profile)
                try:
                    return of_rank()
                finally:
                    sys.setprofile(None)
        finally:
            ranks.ends(rank)

    with _watched(ranks):
        results = run_threads(num_ranks, on_rank, catch=True, draws=True)
    for result in results:
        if isinstance(result, BaseException) and target is None:
            raise result
    tracer = tracers[0]
    return _Run(results, ranks, tracer.num_joined(), sorted(tracer.places.values()), tracer.raised)


def faults(
    num_ranks: int,
    call: Callable[[int], Callable[[], Any]],
    changes: Callable[[], list[str]] = list,
    *,
    gaps_per_line: int = 2,
    each_rank: bool = True,
    tried: Tried | None = None,
    within: tuple[str, ...] = ("",),
) -> tuple[int, list[str]]:
    """Return how many places there are, and a line for each after whose error not every rank raised it.

    ``call(rank)`` makes what the rank then calls; ``changes()`` says, after a run, what differs from before. The
    last and the first rank meet the error, each in ``gaps_per_line`` of the gaps in which it comes to a line; unless
    ``each_rank``, the first only at lines to which the last does not come. Lines are of files whose paths in the
    library begin with one of ``within``. Calls with one ``tried`` share these gaps.
    """
    gc.collect()
    gc.disable()  # it calls back wherever it happens to run
    try:
        counts = Counter() if tried is None else tried
        return _faults(num_ranks, call, changes, gaps_per_line, each_rank, counts, within)
    finally:
        gc.enable()


def _faults(
    num_ranks: int,
    call: Callable[[int], Callable[[], Any]],
    changes: Callable[[], list[str]],
    gaps_per_line: int,
    each_rank: bool,
    tried: Tried,
    within: tuple[str, ...],
) -> tuple[int, list[str]]:
    wrong: list[str] = []
    seen: set[tuple[int, str]] = set()
    done: set[tuple[int, str]] = set()
    _run(num_ranks, call, 0, None)  # what happens once in a process, happens here
    for victim in (num_ranks - 1, 0):
        good = _run(num_ranks, call, victim, None)
        for place in (place for place in good.places if place.line.startswith(within)):
            seen.add((place.gap, place.line))
            who = victim if each_rank else None
            if (place.gap, place.line) in done or tried[who, place.line] == gaps_per_line:
                continue
            done.add((place.gap, place.line))
            tried[who, place.line] += 1
            run = _run(num_ranks, call, victim, place)
            said = _said(run, victim) or ", ".join(f"{name} changed" for name in changes())
            if said:
                wrong.append(f"gap {place.gap} of {good.num_gaps}, {place.line}, {place.callee}: {said}")
    return len(seen), wrong


def _said(run: _Run, victim: int) -> str:
    if not run.raised:
        return "the place is not met again"
    if run.ranks.hang:
        return "hangs"
    for rank, result in enumerate(run.results):
        if not isinstance(result, BaseException):
            return f"rank {rank} went on" if rank != victim else "swallowed"
        if _TEXT not in str(result):
            return f"rank {rank} raised {result!r}"
    return ""
