"""What every benchmark needs: ranks of one thread in fresh processes, peak memory, and a report's heading."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import platform
import re
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distprune.models.decoder_blocks import decoder_blocks

__all__ = [
    "Peak",
    "anonymous_bytes",
    "heading",
    "on_ranks",
    "peak_memory",
    "shard",
    "show",
    "spread",
    "table",
    "unpin",
]

_SAMPLE_SECONDS = 0.001


def anonymous_bytes() -> int:
    """Return this process's anonymous resident memory; files it maps are not in it (Linux)."""
    text = Path("/proc/self/status").read_text()
    match = re.search(r"RssAnon:\s+(\d+) kB", text)
    if match is None:
        raise RuntimeError("this kernel does not tell RssAnon; run on Linux 4.5 or later")
    return 1024 * int(match.group(1))


@dataclass
class Peak:
    """Bytes above what was there at the start."""

    num_bytes: int = 0


@contextmanager
def peak_memory(sample_seconds: float = _SAMPLE_SECONDS) -> Iterator[Peak]:
    """Sample anonymous memory while the body runs; the thread that does takes its part of the interpreter's time."""
    start, peak, done = anonymous_bytes(), Peak(), threading.Event()

    def sample() -> None:
        while not done.wait(sample_seconds):
            peak.num_bytes = max(peak.num_bytes, anonymous_bytes() - start)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak.num_bytes = max(peak.num_bytes, anonymous_bytes() - start)


def on_ranks(num_ranks: int, fn: Callable[..., Any], *args: Any, fresh: bool = True) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``num_ranks`` processes of one thread with a gloo group; results by rank.

    They are ``fresh``, or forks of one process that has torch imported, and take less memory.
    """
    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    if not fresh:
        context.set_forkserver_preload(["torch", "distprune", fn.__module__])
    with tempfile.TemporaryDirectory() as folder:
        pipes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(theirs, rank, num_ranks, f"{folder}/store", fn, args))
            process.start()
            theirs.close()
            pipes.append((ours, process))
        results = [pipe.recv() for pipe, _ in pipes]
        for _, process in pipes:
            process.join()
    return results


def _rank(pipe: Any, rank: int, num_ranks: int, store: str, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # huge pages, as the command line asks for
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    cores = sorted(os.sched_getaffinity(0))
    if num_ranks <= len(cores):
        # Ranks that talk are otherwise drawn to one core by the kernel, which takes them for one task. Only
        # this thread: gloo's own, made by now, must not wait for it.
        os.sched_setaffinity(0, {cores[rank]})
    pipe.send(fn(rank, *args))
    dist.destroy_process_group()


def shard(model: nn.Module) -> None:
    """Shard ``model`` by FSDP2 over all ranks, block by block, if there are several."""
    if dist.get_world_size() > 1:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*(block for _, block in decoder_blocks(model)), model):
            fully_shard(module, mesh=mesh)


def unpin() -> None:
    """Let this rank run on any core, not only on that of its number: another run may be there."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


def heading(title: str, command: str) -> str:
    """Return the first lines of a report: what, when, on what, with which versions."""
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown")
    versions = ", ".join(f"{name} {version(name)}" for name in ("distprune", "torch", "numpy"))
    return (
        f"# {title}\n\n"
        f"- Date: {datetime.date.today().isoformat()}\n"
        f"- Hardware: {cpu}, {os.cpu_count()} cores; ranks of one thread, each on its own core where there are enough, "
        "SCHED_BATCH,\n"
        f"  transparent huge pages asked for (kernel: {_huge_pages()})\n"
        f"- Versions: Python {platform.python_version()}, {versions}\n"
        f"- Command: `{command}`\n"
    )


def _huge_pages() -> str:
    """Return the kernel's setting for anonymous memory: always, madvise or never."""
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", path.read_text()) if path.exists() else None
    return match.group(1) if match else "never"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median, the least and the greatest as text; of no values, none."""
    if not values:
        return ""
    middle, least, greatest = (f"{fn(values):.{digits}f}" for fn in (statistics.median, min, max))
    return f"{middle} ({least} to {greatest})"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def show(text: str, output: Path | None) -> None:
    """Print a report, and write it to ``output``."""
    print(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, "utf-8")
