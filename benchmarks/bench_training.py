"""A training step of a pruned FSDP2 model, against the same step dense and against PyTorch's way.

PyTorch's way is ``torch.nn.utils.prune`` before ``fully_shard``: every rank keeps a whole float mask and
multiplies the gathered weight by it. Two ranks of one thread.

    python -m benchmarks.bench_training --output benchmarks/results/training_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

import distprune as prune
from benchmarks.measure import heading, on_ranks, peak_memory, table

NUM_LAYERS, SIZE, NUM_HEADS, NUM_SAMPLES, NUM_TOKENS = 4, 512, 8, 4, 256
# Freed memory stays with the process, as torch's allocators for accelerators keep it. Otherwise which
# operation pays for the page faults changes with every allocation before it, by more than masks cost.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
WAYS = ("dense", "dense, again", "distprune", "torch before fully_shard")  # the second shows what is noise


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.as_tensor(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + torch.as_tensor(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


def build(way: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
    pairs: list[tuple[nn.Module, str]] = [
        (module, "weight") for module in model.modules() if isinstance(module, nn.Linear)
    ]
    if way == "torch before fully_shard":
        for module, name in pairs:
            cast(Any, torch_prune).l1_unstructured(module, name, 0.5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if way == "distprune":
        prune.prune_each(pairs, prune.L1Unstructured, amount=0.5)
    return model


def mask_bytes(model: nn.Module) -> int:
    return sum(
        (buffer.to_local() if isinstance(buffer, DTensor) else buffer).nbytes
        for name, buffer in model.named_buffers()
        if name.endswith("_mask")
    )


class Trainer:
    def __init__(self, way: str, rank: int) -> None:
        self.model = build(way)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(rank)
        self.batch = torch.randn(NUM_SAMPLES, NUM_TOKENS, SIZE, generator=generator)

    def step(self) -> tuple[float, float]:
        """Return the seconds on the clock, and those this rank's thread worked."""
        dist.barrier()
        clock, worked = time.perf_counter(), time.thread_time()
        cast(torch.Tensor, self.model(self.batch).square().mean()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - clock, time.thread_time() - worked


def times(rank: int, way: str, num_steps: int, dense_first: bool) -> dict[str, list[tuple[float, float]]]:
    """Return the times of every step of the dense model and of the other, which take turns: ABBA."""
    order = ("dense", way) if dense_first else (way, "dense")  # what is built first lies better in memory
    trainers = {name: Trainer(name, rank) for name in order}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for step in range(num_steps + 2):
        for name in list(trainers)[:: 1 if step % 2 else -1]:
            taken = trainers[name].step()
            if step >= 2:
                seconds[name].append(taken)
    return seconds


def memory(rank: int, way: str) -> tuple[int, int]:
    """Return the bytes of masks on this rank, and the peak of building and training for three steps."""
    with peak_memory() as peak:
        trainer = Trainer(way, rank)
        for _ in range(3):
            trainer.step()
        masks = mask_bytes(trainer.model)
    return masks, peak.num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for way in WAYS[1:]:
        os.environ.update(KEEP_MEMORY)
        launches = [on_ranks(2, times, way, arguments.steps, i % 2 == 0) for i in range(arguments.launches)]
        for variable in KEEP_MEMORY:
            del os.environ[variable]
        # Steps of one turn share the machine's mood: compare them, not the medians of different minutes.
        clock, worked = (_median([_slowdown(launch, way, i) for launch in launches]) for i in range(2))
        for name in (way, "dense") if way == WAYS[-1] else (way,):
            masks, peak = max(on_ranks(2, memory, name))
            rows.append(
                (
                    name,
                    f"{1000 * _median([step[0] for launch in launches for step in launch[0][name]]):.0f}",
                    "" if name == "dense" else f"{100 * (clock - 1):+.1f} %",
                    "" if name == "dense" else f"{100 * (worked - 1):+.1f} %",
                    f"{masks / 2**20:.2f}",
                    f"{peak / 2**20:.0f}",
                )
            )
    columns = ("way", "step ms", "over dense, clock", "over dense, CPU", "masks MiB a rank", "peak MiB a rank")
    text = (
        heading("A training step with half of the weights masked, on FSDP2", "python -m benchmarks.bench_training")
        + f"\n{NUM_LAYERS} transformer blocks of width {SIZE}, float32, AdamW, "
        f"{NUM_SAMPLES} x {NUM_TOKENS} tokens a rank.\n"
        "Each way takes turns with the dense model in processes of their own, and every step is compared with the\n"
        "dense step of its turn: by the clock, and by the time the rank's thread worked. Medians of "
        f"{arguments.steps} steps, the\nslower rank's; of those the median of {arguments.launches} launches. While\n"
        "the clock runs, freed memory stays with the process (glibc's thresholds raised). Peaks are of building and\n"
        "training alone.\n\n" + table(columns, rows)
    )
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


def _slowdown(launch: list[Any], way: str, clock: int) -> float:
    """Return how many times as long as the dense step the other takes, on the slower rank."""
    return max(
        _median([pruned[clock] / dense[clock] for pruned, dense in zip(of[way], of["dense"], strict=True)])
        for of in launch
    )


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
