"""Selecting the lowest half of |w| over ranks, against what one would use instead and against the floor.

python -m benchmarks.bench_selection [--elements 33554432] [--output benchmarks/results/FILE.md]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune as torch_prune

from benchmarks.measure import heading, median_seconds, on_ranks, peak_memory, table
from distprune.collectives import Communicator, communicator
from distprune.scores import Magnitude
from distprune.selection import Competition, Entry, common_order, select_lowest
from distprune.shards import Geometry, LocalShard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOOR_CHUNK = 1 << 18  # elements; the fastest of 2**15 to 2**20 here

Run = Callable[[], Any]


def ours(local: torch.Tensor, first: int, numel: int, comm: Communicator) -> Run:
    geometry = Geometry((numel,), (((first, first + local.numel()),),))
    scores = Magnitude(LocalShard("w", local, geometry, True, 1))
    order = common_order([(scores.ordered_by, scores.dtype)])
    competition = Competition("w", order, numel, numel, numel // 2)
    return lambda: select_lowest(comm, [competition], [Entry("w", scores, geometry, True, 0, 0)]).masks[0]


def floor(local: torch.Tensor, threshold: float) -> Run:
    """One chunked pass that counts |w| < t, and one that writes |w| > t into a new mask."""

    def run() -> torch.Tensor:
        magnitude = torch.empty(FLOOR_CHUNK, dtype=local.dtype)
        below = torch.empty(FLOOR_CHUNK, dtype=torch.bool)
        num_below = 0
        for part in torch.split(local, FLOOR_CHUNK):
            size = part.numel()
            torch.abs(part, out=magnitude[:size])
            num_below += int(torch.count_nonzero(torch.lt(magnitude[:size], threshold, out=below[:size])))
        mask = torch.empty(local.shape, dtype=torch.bool)
        for part, written in zip(torch.split(local, FLOOR_CHUNK), torch.split(mask, FLOOR_CHUNK), strict=True):
            torch.abs(part, out=magnitude[: part.numel()])
            torch.gt(magnitude[: part.numel()], threshold, out=written)
        return mask

    return run


def torch_global(local: torch.Tensor) -> Run:
    def run() -> torch.Tensor:
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = nn.Parameter(local)
        torch_prune.global_unstructured([(layer, "weight")], torch_prune.L1Unstructured, amount=0.5)
        return torch.as_tensor(layer.weight_mask)

    return run


def topk(local: torch.Tensor) -> Run:
    def run() -> torch.Tensor:
        mask = torch.ones(local.shape, dtype=torch.bool)
        mask[torch.topk(local.abs(), local.numel() // 2, largest=False).indices] = False
        return mask

    return run


def kthvalue(local: torch.Tensor) -> Run:
    """Ties at the threshold all go: not an exact count, but what people write."""
    return lambda: local.abs() > torch.kthvalue(local.abs(), local.numel() // 2).values


def gather(local: torch.Tensor, numel: int) -> Run:
    def run() -> torch.Tensor:
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        magnitude = torch.cat(parts).abs()
        return local.abs() > torch.kthvalue(magnitude, numel // 2).values

    return run


def measure(rank: int, name: str, dtype_name: str, numel: int, repeats: int) -> dict[str, Any]:
    """Time one contender on this rank's part of the same values, and its memory beyond the mask."""
    num_ranks = dist.get_world_size()
    local_numel = numel // num_ranks
    generator = torch.Generator().manual_seed(rank)
    local = torch.randn(local_numel, generator=generator).to(DTYPES[dtype_name])
    comm = communicator()
    runs: dict[str, Run] = {
        "distprune": ours(local, rank * local_numel, numel, comm),
        "floor": floor(local, 0.6745),
        "global_unstructured": torch_global(local),
        "topk": topk(local),
        "kthvalue": kthvalue(local),
        "gather": gather(local, numel),
    }
    run = runs[name]
    with peak_memory() as peak:
        run()
    traffic = comm.traffic.copy()
    seconds = median_seconds(run, repeats, before=dist.barrier)
    calls = repeats + (repeats > 1)
    used = comm.traffic - traffic
    return {
        "seconds": seconds,
        "beyond_mask": max(0, peak.num_bytes - local_numel),
        "rounds": used.num_rounds // calls,
        "bytes": used.num_bytes // calls,
    }


CONTENDERS = {
    "floor": "the floor: a pass counting \\|w\\| < t, a pass writing \\|w\\| > t",
    "distprune": "distprune",
    "kthvalue": "torch.kthvalue (ties not split)",
    "topk": "torch.topk",
    "gather": "gather all, then kthvalue",
    "global_unstructured": "torch.nn.utils.prune.global_unstructured",
}
SLOW = {"global_unstructured": 1, "topk": 3, "kthvalue": 3, "gather": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=32 << 20)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    numel = arguments.elements
    rows, seconds = [], {}
    for dtype in DTYPES:
        for num_ranks in (1, 2, 4):
            for name in ("floor", "distprune", "gather") if num_ranks > 1 else CONTENDERS:
                if name == "gather" and num_ranks == 1:
                    continue
                repeats = SLOW.get(name, arguments.repeats)
                results = on_ranks(num_ranks, measure, name, dtype, numel, repeats)
                slowest = max(result["seconds"] for result in results)
                seconds[dtype, num_ranks, name] = slowest
                rows.append(
                    (
                        dtype,
                        num_ranks,
                        CONTENDERS[name],
                        f"{slowest * 1e3:.1f}",
                        f"{slowest / numel * 1e9:.2f}",
                        f"{slowest / seconds[dtype, num_ranks, 'floor']:.2f}",
                        f"{statistics.mean(result['beyond_mask'] for result in results) / 2**20:.0f}",
                        results[0]["rounds"] if name == "distprune" else "-",
                        f"{results[0]['bytes']:,}" if name == "distprune" else "-",
                    )
                )
                print(*rows[-1], sep="  ", flush=True)
    columns = (
        "dtype",
        "ranks",
        "what",
        "ms",
        "ns an element",
        "x floor",
        "MiB beyond the mask",
        "rounds",
        "bytes a rank",
    )
    fp32 = {name: seconds["float32", 1, name] for name in CONTENDERS if ("float32", 1, name) in seconds}
    text = (
        heading(f"Selecting half of {numel:,} weights", "python -m benchmarks.bench_selection")
        + "\nThe slowest rank's median; memory is RssAnon sampled every millisecond in a fresh process, the mask\n"
        "taken off, the mean over ranks. The same number of elements in all, whatever the number of ranks.\n\n"
        + table(columns, rows)
        + f"\nOne thread, float32: {fp32['global_unstructured'] / fp32['distprune']:.0f} times as fast as "
        f"`torch.nn.utils.prune.global_unstructured`, {fp32['distprune'] / fp32['floor']:.2f} times the floor; "
        f"2 ranks {fp32['distprune'] / seconds['float32', 2, 'distprune']:.2f} times as fast as 1.\n"
    )
    print("\n" + text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
