"""``l1_unstructured`` over all 210 Linear weights of SmolLM2-135M, against ``torch.nn.utils.prune``.

python -m benchmarks.bench_functions --output benchmarks/results/functions_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn

import distprune as prune
from benchmarks.measure import heading, on_ranks, shard, show, table
from distprune.collectives.base import Traffic
from distprune.collectives.communicator import communicator
from distprune.models.decoder_blocks import decoder_blocks
from launch.demo_inputs import demo_model

AMOUNT = 0.5
WAYS = ("torch, call by call", "distprune, call by call", "distprune, one prune_each")


def linears(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (module, "weight")
        for _, block in decoder_blocks(model)
        for module in block.modules()
        if isinstance(module, nn.Linear)
    ]


def measure(rank: int, path: str, way: str, repeats: int) -> dict[str, Any]:
    """Return the median seconds, and the rounds and bytes of one pass over all weights."""
    from transformers import AutoModelForCausalLM

    del rank
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    comm = communicator()
    shard(model)
    pairs = linears(model)
    parameters = [module.get_parameter(name) for module, name in pairs]
    originals = [parameter.detach().clone() for parameter in parameters]
    seconds = []
    used = Traffic()
    for _ in range(repeats):
        comm.sum(torch.zeros(1, dtype=torch.int64))
        before = comm.traffic.copy()
        started = time.perf_counter()
        if way == WAYS[0]:
            for module, name in pairs:
                cast(Any, torch_prune).l1_unstructured(module, name, AMOUNT)
        elif way == WAYS[1]:
            for module, name in pairs:
                prune.l1_unstructured(module, name, AMOUNT, group=comm)
        else:
            prune.prune_each(pairs, prune.L1Unstructured, amount=AMOUNT, group=comm)
        seconds.append(time.perf_counter() - started)
        used = comm.traffic - before
        for module, name in pairs:
            prune.remove(module, name)
        with torch.no_grad():
            for parameter, original in zip(parameters, originals, strict=True):
                parameter.copy_(original)
    return {
        "seconds": sorted(seconds)[len(seconds) // 2],
        "weights": len(pairs),
        "elements": sum(parameter.numel() for parameter in parameters),
        "rounds": used.num_rounds,
        "kibibytes": used.num_bytes / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    path = str(demo_model())
    rows: list[tuple[Any, ...]] = []
    first: dict[str, Any] = {}
    baseline = 0.0
    for way, num_ranks, repeats in (
        (WAYS[0], 1, 1),
        (WAYS[1], 1, arguments.repeats),
        (WAYS[2], 1, arguments.repeats),
        (WAYS[1], 2, arguments.repeats),
        (WAYS[2], 2, arguments.repeats),
    ):
        results = on_ranks(num_ranks, measure, path, way, repeats)
        slowest = max(result["seconds"] for result in results)
        baseline = baseline or slowest
        first = results[0]
        rows.append(
            (
                way,
                num_ranks,
                f"{slowest:.3f}",
                f"{baseline / slowest:.0f}",
                "-" if way == WAYS[0] else first["rounds"],
                "-" if way == WAYS[0] else f"{first['kibibytes']:,.0f}",
            )
        )
    columns = ("way", "ranks", "seconds", "times as fast", "rounds", "KiB a rank")
    text = (
        heading("l1_unstructured over every Linear of SmolLM2-135M", "python -m benchmarks.bench_functions")
        + f"\n{first['weights']} weights, {first['elements']:,} elements, float32, amount {AMOUNT}, reparametrized; "
        "sharded by FSDP2 where there are two ranks.\nMedian of the passes, each on a model that is not pruned; the "
        "slower rank's time.\n\n" + table(columns, rows)
    )
    show(text, arguments.output)


if __name__ == "__main__":
    main()
