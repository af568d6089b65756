"""What one of a thousand ranks does beside reading its weights: CPU time, rounds and bytes, on a fake process group.

``python -m benchmarks.bench_scale`` prints a report. Each rank holds 8 x 32 weights of every parameter, so that what is
measured is overhead alone. The other ranks are not there: sums come out as if all held what this one holds, which makes
1,024 equal scores of every one, the worst case for ties.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.measure import heading, show, spread, table
from distprune.collectives.base import Traffic
from tests.fake_files import PLANS
from tests.fake_ranks import (
    CALLS,
    SOLVERS,
    STEPS,
    TRAINING,
    EqualRanks,
    Prepare,
    fake_block,
    fake_group,
    inputs_of,
    prune_block,
    sharded_model,
)

_ABOUT = """Nothing was sent: torch's fake process group lays the DTensors out, and sums come out as if all ranks held
what this one holds, 8 x 32 weights of every parameter. So every score stands as often as there are ranks, the worst
case for ties; and where many tensors are decided one by one all ranks know their thresholds, the best case. Times are
those of one core. What is planned of files is of a checkpoint of which only headers are there: opening it together,
sampling it, and which slices, or pieces to stream by 2:4, are this rank's.
"""
_ABOUT_BLOCKS = """A decoder block whose inputs are known: attention and experts, or a dense one, of width 4, a few rows
of each layer on each rank. Every input has an owner, which is given all rows of its layers and gives them back; or its
layers are pruned where they are. The first block finds out who holds which rows. Of the bytes 96 an input are its sum
on the way to its owner, or 64 the sums of its features on the way to all.
"""


def measured(
    call: Callable[[nn.Module, EqualRanks], object], size: int, num_parameters: int, num_times: int
) -> list[str]:
    """Return microseconds of CPU a parameter, rounds and KiB.

    Each call has a new model. The first is not timed; rounds and bytes are those of the last.
    """
    with fake_group(size) as comm:
        seconds, used = [], comm.traffic
        for _ in range(1 + num_times):
            model = sharded_model(num_parameters, size)
            before = comm.traffic.copy()
            started = time.process_time()
            call(model, comm)
            seconds.append((time.process_time() - started) / num_parameters * 1e6)
            used = comm.traffic - before
        return [spread(seconds[1:], 0), str(used.num_rounds), f"{used.num_bytes / 1024:.0f}"]


def measured_training(prepare: Prepare, size: int, num_parameters: int, num_times: int) -> list[str]:
    """Return the same of what is done again and again with one model. The first two times are not timed."""
    with fake_group(size) as comm:
        call, seconds, used = prepare(sharded_model(num_parameters, size), comm), [], comm.traffic
        for _ in range(2 + num_times):
            before = comm.traffic.copy()
            started = time.process_time()
            call()
            seconds.append((time.process_time() - started) / num_parameters * 1e6)
            used = comm.traffic - before
        return [spread(seconds[2:], 0), str(used.num_rounds), f"{used.num_bytes / 1024:.0f}"]


def of_blocks(how: str, size: int, num_experts: int, num_times: int) -> list[str]:
    """Return microseconds of CPU a layer, and rounds and KiB of the first and of later blocks."""
    seconds, used = list[float](), list[Traffic]()
    with fake_group(size) as comm:
        linears = fake_block(size, num_experts)
        for _ in range(1 + num_times):
            statistics, before = inputs_of(comm, linears, SOLVERS[how]), comm.traffic.copy()
            started = time.process_time()
            prune_block(comm, statistics, SOLVERS[how])
            seconds.append((time.process_time() - started) / len(linears) * 1e6)
            used.append(comm.traffic - before)
    traffic = [text for of in (used[0], used[-1]) for text in (str(of.num_rounds), f"{of.num_bytes / 1024:.0f}")]
    return [str(len(linears)), spread(seconds[1:], 0), *traffic]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 1000, 5000])
    parser.add_argument("--experts", type=int, nargs="+", default=[0, 256])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        [name, f"{size:,}", f"{num:,}", *measured(call, size, num, arguments.times)]
        for name, call in {**CALLS, **PLANS}.items()
        for size in arguments.sizes
        for num in arguments.parameters
    ]
    times = {name: arguments.times * (4 if name in STEPS else 1) for name in TRAINING}
    rows += [
        [name, f"{size:,}", f"{num:,}", *measured_training(prepare, size, num, times[name])]
        for name, prepare in TRAINING.items()
        for size in arguments.sizes
        for num in arguments.parameters
    ]
    columns = ["call", "ranks", "parameters", "CPU a parameter, µs (median, least to most)", "rounds", "KiB a rank"]
    sizes, parameters = (" ".join(map(str, numbers)) for numbers in (arguments.sizes, arguments.parameters))
    command = f"python -m benchmarks.bench_scale --sizes {sizes} --parameters {parameters} --times {arguments.times}"
    text = heading("One of a thousand ranks, simulated", command) + "\n" + _ABOUT + "\n" + table(columns, rows)
    blocks = [
        [how, f"{size:,}", f"{num:,}", *of_blocks(how, size, num, arguments.times)]
        for how in SOLVERS
        for num in arguments.experts
        for size in arguments.sizes
    ]
    columns = ["rows are pruned", "ranks", "experts", "layers", "CPU a layer, µs (median, least to most)"]
    columns += ["rounds, first block", "KiB a rank", "rounds, later", "KiB a rank, later"]
    show(text + "\n\nOne-shot pruning of a block.\n" + _ABOUT_BLOCKS + "\n" + table(columns, blocks), arguments.output)


if __name__ == "__main__":
    main()
