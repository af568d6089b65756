"""Pruning half of the weights in one call: the floor, in place, and torch's own function beside ours.

python -m benchmarks.bench_selection [--elements 33554432] [--turns 7] [--output benchmarks/results/FILE.md]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import prune as torch_prune

import distprune as prune
from benchmarks.measure import heading, on_ranks, peak_memory, show, table
from distprune.shards.device import chunk_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COLUMNS = 4096
SLOW_TURNS = 1  # of torch's own function


@dataclass(frozen=True)
class Contender:
    """A call on a module whose weights are as drawn, or (``on_pruned``) pruned in place before."""

    what: str
    call: Callable[[nn.Module], object]
    undo: Callable[[nn.Module], object] = lambda _: None
    on_pruned: bool = False
    max_ranks: int = 2


def floor(module: nn.Module) -> None:
    """Count |w| < t, chunk by chunk, and write zeros there: both over the bits as integers."""
    weight = module.get_parameter("weight").detach()
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    is_wide = local.dtype is torch.float32
    bits = local.view(-1).view(torch.int32 if is_wide else torch.int16).numpy()
    median = torch.tensor(0.6745, dtype=local.dtype)
    threshold = median.view(torch.int32 if is_wide else torch.int16).numpy()[()]
    step = chunk_size(torch.device("cpu"))
    keys, keep = np.empty(step, bits.dtype), np.empty(step, np.bool_)
    num_below = 0
    for writes in (False, True):
        for start in range(0, len(bits), step):
            part = bits[start : start + step]
            np.bitwise_and(part, bits.dtype.type(np.iinfo(bits.dtype).max), out=keys[: len(part)])
            kept = np.greater_equal(keys[: len(part)], threshold, out=keep[: len(part)])
            if writes:
                np.multiply(part, kept.view(np.int8), out=part)
            else:
                num_below += len(part) - int(np.count_nonzero(kept))
    assert abs(num_below / max(len(bits), 1) - 0.5) < 0.05


def ours(module: nn.Module) -> None:
    prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=0.5)


def torchs(module: nn.Module) -> None:
    cast(Any, torch_prune).global_unstructured([(module, "weight")], torch_prune.L1Unstructured, amount=0.5)


CONTENDERS = {
    "floor": Contender("the floor: a pass that counts, a pass that writes", floor),
    "in place": Contender("`prune_model(module, 0.5)`", lambda module: prune.prune_model(module, 0.5)),
    "again": Contender("the same on the pruned weights", lambda m: prune.prune_model(m, 0.5), on_pruned=True),
    "global": Contender("`distprune.global_unstructured`", ours, lambda m: prune.remove(m, "weight")),
    "torch": Contender(
        "`torch.nn.utils.prune.global_unstructured`",
        torchs,
        lambda m: cast(Any, torch_prune).remove(m, "weight"),
        max_ranks=1,
    ),
}


def drawn(dtype: torch.dtype, numel: int) -> nn.Linear:
    """Return a layer of ``numel`` normal weights, a DTensor of rows where there are several ranks."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    local = torch.randn(numel // COLUMNS // num_ranks, COLUMNS, generator=generator).to(dtype)
    module = nn.Linear(1, 1, bias=False)
    whole = DTensor.from_local(local, init_device_mesh("cpu", (num_ranks,)), [Shard(0)]) if num_ranks > 1 else local
    module.weight = nn.Parameter(whole)
    return module


def measure(rank: int, dtype_name: str, numel: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of every turn, by contender. Contenders take turns, so that what drifts hits all."""
    module = drawn(DTYPES[dtype_name], numel)
    local = module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight
    as_drawn = local.detach().clone()
    prune.prune_model(module, 0.5)
    pruned = local.detach().clone()
    names = [name for name, each in CONTENDERS.items() if dist.get_world_size() <= each.max_ranks]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 1):  # the first one warms up
        for name in names:
            contender = CONTENDERS[name]
            if name == "torch" and turn > SLOW_TURNS:
                continue
            with torch.no_grad():  # outside of the timing, as is the undoing
                local.copy_(pruned if contender.on_pruned else as_drawn)
            dist.barrier()
            started = time.perf_counter()
            contender.call(module)
            took = time.perf_counter() - started
            contender.undo(module)
            local = module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight
            if name == "torch":  # which of those that tie go is its own matter
                assert abs(int((local == 0).sum()) - numel // 2) <= numel // 10_000
            elif name != "floor":
                assert torch.equal(local.detach(), pruned), f"{name} prunes other weights on rank {rank}"
            if turn:
                seconds[name].append(took)
    return seconds


def memory(rank: int, dtype_name: str, numel: int, name: str) -> int:
    """Return the extra bytes at the peak of the first large call of ``name`` in this process."""
    del rank
    # Imports and first uses are no memory of a call.
    small = drawn(DTYPES[dtype_name], COLUMNS * dist.get_world_size())
    CONTENDERS[name].call(small)
    module = drawn(DTYPES[dtype_name], numel)
    if CONTENDERS[name].on_pruned:
        prune.prune_model(module, 0.5)
    with peak_memory() as peak:
        CONTENDERS[name].call(module)
    return peak.num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=32 << 20)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    numel = arguments.elements
    rows: list[tuple[Any, ...]] = []
    lines = []
    for dtype in DTYPES:
        least: dict[tuple[int, str], float] = {}
        for num_ranks in (1, 2):
            results = on_ranks(num_ranks, measure, dtype, numel, arguments.turns)
            for name in results[0]:
                # Of each turn the slowest rank's; of these the least: other work on the machine only adds.
                least[num_ranks, name] = min(
                    max(of_turn) for of_turn in zip(*(result[name] for result in results), strict=True)
                )
                extra = max(on_ranks(num_ranks, memory, dtype, numel, name))
                nanoseconds = least[num_ranks, name] / numel * 1e9
                ratio = least[num_ranks, name] / least[num_ranks, "floor"]
                what = CONTENDERS[name].what
                rows.append((dtype, num_ranks, what, f"{nanoseconds:.2f}", f"{ratio:.2f}", f"{extra / 2**20:.0f}"))
                print(*rows[-1], sep="  ", flush=True)
        faster, scaling = least[1, "torch"] / least[1, "global"], least[1, "in place"] / least[2, "in place"]
        lines.append(
            f"{dtype}, one thread: in place {least[1, 'in place'] / numel * 1e9:.2f} ns an element; "
            f"`global_unstructured` {faster:.0f} times as fast as torch's same call; in place 2 ranks are "
            f"{scaling:.2f} times as fast as 1.\n"
        )
    columns = ("dtype", "ranks", "what", "ns an element", "x floor", "extra MiB at the peak")
    text = (
        heading(f"Pruning half of {numel:,} weights", "python -m benchmarks.bench_selection")
        + "\nThe slowest rank's time in the fastest of alternating turns; as many elements in all for any number of\n"
        "ranks. Weights are put back between turns, outside of the timing, and every result is compared. Memory is\n"
        "RssAnon sampled every millisecond, of a first call in a fresh process, with what it leaves (the mask).\n"
        "`global_unstructured` leaves a mask of the weights' dtype and a product; in place leaves nothing.\n\n"
        + table(columns, rows)
        + "\n"
        + "".join(lines)
    )
    print()
    show(text, arguments.output)


if __name__ == "__main__":
    main()
