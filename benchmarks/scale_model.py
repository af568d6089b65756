"""On paper: what a prune, a training step, a one-shot block and a streamed job cost on 8 to 16,384 ranks.

``python -m benchmarks.scale_model`` prints the tables. Nothing is run: constants that were measured (on CPUs, or on a
simulated device) and bandwidths that are assumed stand at the top; what one-shot pruning takes the library plans.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import show, table
from distprune.oneshot.memory_plan import (
    BLOCK,
    EXPERT_SECONDS,
    FACTORS,
    FORWARD,
    LAYER_SECONDS,
    MESSAGES,
    PYTHON,
    ROWS,
    SUMS,
    TOKENS,
    WAVES,
    plan_walk,
)
from distprune.oneshot.walk_costs import DEVICE, BlockShape, InputShape, ModelShape, WalkRequest

# Measured: seconds of Python a parameter on one of 1,024 ranks (scale_epyc-2core_2026-11-25.md).
PRUNE_CALL, HELD_STEP, UPDATE = 112e-6, 17e-6, 850e-6
ROUNDS, STREAM_PLAN = 6, 275e-6
# Counted on CPU tensors by the code for devices: bytes a global call touches an element of bfloat16. 6 are needed.
TOUCHED = 43
# Assumed, of a device, its network (of 8 devices a node) and the disks. Bytes, or operations, a second.
HBM, MATMUL, NETWORK = 0.7 * 3.35e12, DEVICE.forward, DEVICE.network
HOP, ROUND = 5e-6, 20e-6
NODE_DISK, ALL_DISKS, DEVICES = 2e9, 500e9, 8
DEVICE_MEMORY = 80e9
NUM_SAMPLES, LENGTH, TOKENS_A_RANK = 128, 2048, 8192

SIZES = (8, 64, 1024, 16384)


@dataclass(frozen=True)
class Model:
    """A decoder: blocks of attention and ``num_experts`` expert MLPs, of which a token passes ``num_active``."""

    name: str
    num_blocks: int
    hidden: int
    width: int
    kv_width: int
    num_experts: int = 1
    num_active: int = 1

    @property
    def inputs(self) -> Iterator[tuple[int, int, bool, int]]:
        """Of each input of a block: (in, out, whether it is added to the residual stream, how often it is there)."""
        yield self.hidden, self.hidden + 2 * self.kv_width, False, 1
        yield self.hidden, self.hidden, True, 1
        yield self.hidden, 2 * self.width, False, self.num_experts
        yield self.width, self.hidden, True, self.num_experts

    @property
    def shape(self) -> ModelShape:
        """What the library's plan of a one-shot walk is made of; weights are bfloat16."""
        share = self.num_active / self.num_experts
        inputs = tuple(
            InputShape(i, o, adds=adds and num == 1, num_experts=num if num > 1 else 0, share=share if num > 1 else 1.0)
            for i, o, adds, num in self.inputs
        )
        size = 2 * self.numel // self.num_blocks
        return ModelShape((BlockShape(inputs, size),) * self.num_blocks, 2 * self.numel, self.hidden, 2)

    @property
    def numel(self) -> int:
        return self.num_blocks * sum(num_in * num_out * num for num_in, num_out, _, num in self.inputs)

    @property
    def num_active_weights(self) -> int:
        of_block = [(num_in * num_out, num) for num_in, num_out, _, num in self.inputs]
        return self.num_blocks * sum(each * (self.num_active if num > 1 else 1) for each, num in of_block)

    @property
    def num_parameters(self) -> int:
        return self.num_blocks * (4 + 3 * self.num_experts)


MODELS = (
    Model("8 B", 32, 4096, 14336, 1024),
    Model("70 B", 80, 8192, 28672, 1024),
    Model("405 B", 126, 16384, 53248, 1024),
    Model("1 T, 384 experts", 61, 7168, 2048, 1024, 384, 8),
)


def latency(size: int) -> float:
    """Return the seconds of a round of few bytes: a tree up and down, and what the host does."""
    return ROUND + 2 * HOP * math.log2(size)


def longest(parts: dict[str, float]) -> str:
    return max(parts, key=lambda name: parts[name])


def text(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def prunes(model: Model, size: int) -> dict[str, float]:
    """Return the seconds of one global call."""
    return {
        "device": model.numel / size * TOUCHED / HBM,
        "Python": model.num_parameters * PRUNE_CALL,
        "network": ROUNDS * latency(size) + (2 * 65536 + 24 * model.num_parameters) / NETWORK,
    }


def trains(model: Model, size: int) -> dict[str, float]:
    """Return the seconds that held zeros add to a step, and those of the step itself: 8,192 tokens a rank."""
    return {
        "step": 6 * model.num_active_weights * TOKENS_A_RANK / MATMUL,
        "held": model.numel / size * 10 / HBM + model.num_parameters * HELD_STEP,
        "update": 2 * prunes(model, size)["device"] + model.num_parameters * UPDATE,
    }


def one_shot_blocks(model: Model, size: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of one block by ADMM with dense targets, and bytes of a rank, as the library plans them."""
    options: dict[str, Any] = {"pairs": True, "by_row": True, "by_layer": True, "has_targets": True}
    plan = plan_walk(model.shape, WalkRequest(size, NUM_SAMPLES, LENGTH, "admm", **options))
    seconds = {name: cost.seconds / model.num_blocks for name, cost in plan.parts.items()}
    parts = {
        "gather": seconds[BLOCK],
        "forward": seconds[FORWARD],
        "statistics": seconds[SUMS] + seconds.get(WAVES, 0.0),
        "on their way": seconds[MESSAGES] + seconds.get(TOKENS, 0.0),
        "factor": seconds[FACTORS],
        "sweep": seconds[ROWS],
        "Python": seconds[PYTHON],
    }
    arriving = sum(cost.arriving for name, cost in plan.parts.items() if name != BLOCK) / model.num_blocks
    sums = plan.parts[SUMS].device + (plan.parts[WAVES].device if WAVES in plan.parts else 0.0)
    return parts, {"sums": sums, "arriving": arriving, "in all": plan.most.device}


def streams(model: Model, size: int, num_reads: int) -> dict[str, float]:
    """Return the seconds of a job from files to files: bfloat16, read ``num_reads`` times, written once."""
    disk = min(max(1, size // DEVICES) * NODE_DISK, ALL_DISKS)
    return {
        "disk": 2 * model.numel * (num_reads + 1) / disk,
        "CPU": model.numel / size * 2.2e-9 * num_reads,
        "Python": model.num_parameters * STREAM_PLAN,
    }


_INTRODUCTION = """# On paper: 8 to 16,384 ranks

- Command: `python -m benchmarks.scale_model`; nothing here was run on so many ranks, or on a device.
- Measured and put in: Python a parameter on one of 1,024 simulated ranks (prune {prune:.0f} µs, what holding
  adds to a step {held:.0f} µs, update {update:.0f} µs, {layer:.1f} ms a layer of a dense one-shot block,
  {expert:.1f} ms of one with experts), {rounds} rounds a call, and the bytes that a selection touches an element on a
  device, by count: {touched}, where 6 are needed. On a CPU core a selection takes 2.2 ns an element of bfloat16.
- Assumed: memory of a device 2.3 TB/s, 400 TFLOP/s in bfloat16, 50 in float32; 40 GB/s of network a device, 5 µs a
  hop, 20 µs of host a round; 2 GB/s of disk a node of 8 devices, 500 GB/s in all; calibration of 128 x 2,048 tokens,
  ADMM with dense targets, as `distprune.oneshot.plan_walk` has it, "arriving" without what FSDP2 gathers; training with
  8,192 tokens a rank and step. Weights are bfloat16, experts a parameter each.
"""

_CHECKED = """## Beside what was run and simulated

- At 1,024 simulated ranks and 5,000 parameters a global call takes 112 µs of CPU a parameter; the model has that.
- 33.5 million weights of bfloat16 on one core took 82 ms (selection_epyc-2core_2026-11-24.md); the model says 74.
- 2:4 from files of 2.73 GB took 1.5 to 2.0 s where `cp` took 0.9 s, and 2.2 s with a sync
  (streamed_fast_xeon-2core_2026-11-23.md); the model says 2.7 s at 2 GB/s, read and written.
- On 64 real processes all calls end, with the bytes of one (many_ranks_epyc-2core_2026-11-24.md); they share 2 cores,
  so that their seconds say nothing of 64 machines.

## What this says

- **A prune** stops scaling where Python does not shrink: 8 B at some 5 ranks, 70 B at 20, 405 B at 75. Below 0.2 s
  nobody waits for it. A mixture whose experts are parameters of their own costs 8 s of Python at any size; with the
  experts of a block in one tensor, as transformers holds them, it is the cost of a dense model. What a device touches,
  {touched} bytes an element of bfloat16, was 870.
- **Held zeros** are lost in the step, at 1 % of it and less, but for experts that are parameters of their own: there
  they and what FSDP itself does for 70,000 parameters are what to mend.
- **A one-shot block** of a dense model stops scaling at some 64 ranks. There all inputs are spread: each rank sends and
  receives the sums of X^T X twice, whatever the number of ranks, and one rank makes the factor of the largest input.
  All blocks of 405 B take 20 minutes then; a reduce-scatter of the triangle would halve the sums, and a factorization
  over several ranks would come next.
- **A one-shot block of a mixture** is within reach of some hundred ranks of 80 GB: tokens go to the experts' owners,
  which have sums of at most 4 GiB at a time, and what arrives at a rank falls with their number, from 9.7 GB at 8 ranks
  to 1.4 GB at 1,024, which are the sums of attention. What bounds it is FSDP2: a block of 34 GB is gathered six times,
  for each stage and both streams, and is there twice for a moment. Experts that are run where they lie would come next.
- **A streamed job** is bounded by the disks, which all share beyond 2,000 ranks; with 70,000 parameters by Python.
"""


def report() -> str:
    """Return all tables."""
    found = _INTRODUCTION.format(
        prune=1e6 * PRUNE_CALL,
        held=1e6 * HELD_STEP,
        update=1e6 * UPDATE,
        layer=1e3 * LAYER_SECONDS,
        expert=1e3 * EXPERT_SECONDS,
        rounds=ROUNDS,
        touched=TOUCHED,
    )
    each = [(model, size) for model in MODELS for size in SIZES]
    rows = [(m.name, f"{size:,}", prunes(m, size)) for m, size in each]
    found += "\n## One global prune\n\n" + table(
        ["model", "ranks", "device", "Python", "network", "in all", "bound by"],
        [[n, s, *map(text, parts.values()), text(sum(parts.values())), longest(parts)] for n, s, parts in rows],
    )
    rows = [(m.name, f"{size:,}", trains(m, size)) for m, size in each]
    found += "\n## One step of sparse training\n\n" + table(
        ["model", "ranks", "the step", "held zeros add", "of the step", "an update adds, every 100 steps or so"],
        [
            [n, s, text(p["step"]), text(p["held"]), f"{p['held'] / p['step']:.2%}", text(p["update"])]
            for n, s, p in rows
        ],
    )
    blocks = [(m, size, *one_shot_blocks(m, size)) for m, size in each]
    found += "\n## One block of one-shot pruning\n\n" + table(
        ["model", "ranks", *blocks[0][2], "in all", "bound by", "all blocks", "sums", "arriving", "device", "fits"],
        [
            [
                m.name,
                f"{size:,}",
                *map(text, parts.values()),
                text(sum(parts.values())),
                longest(parts),
                f"{sum(parts.values()) * m.num_blocks / 3600:.2g} h",
                *(f"{num_bytes / 1e9:.3g} GB" for num_bytes in sizes.values()),
                "yes" if sizes["in all"] <= DEVICE_MEMORY else "no",
            ]
            for m, size, parts, sizes in blocks
        ],
    )
    jobs = [(m.name, f"{s:,}", what, streams(m, s, n)) for m, s in each for what, n in (("2:4", 1), ("global", 2))]
    found += "\n## One streamed job\n\n" + table(
        ["model", "ranks", "pattern", "disk", "CPU", "Python", "bound by"],
        [[n, s, what, *map(text, parts.values()), longest(parts)] for n, s, what, parts in jobs],
    )
    return found + "\n" + _CHECKED.format(touched=TOUCHED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    show(report(), parser.parse_args().output)


if __name__ == "__main__":
    main()
