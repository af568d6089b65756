"""A training step of a pruned FSDP2 model, against the same step dense and against PyTorch's way.

PyTorch's way is ``torch.nn.utils.prune`` before ``fully_shard``: every rank keeps a whole float mask and
multiplies the gathered weight by it. The three models take turns, step by step, in one process a rank.

    python -m benchmarks.bench_training --output benchmarks/results/training_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
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
WAYS = ("dense", "distprune", "torch before fully_shard")


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

    def step(self) -> float:
        dist.barrier()
        started = time.perf_counter()
        cast(torch.Tensor, self.model(self.batch).square().mean()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started


def times(rank: int, num_steps: int) -> dict[str, list[float]]:
    trainers = {way: Trainer(way, rank) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(num_steps + 2):
        for i in range(len(WAYS)):  # each way follows each other one equally often
            way = WAYS[(step + i) % len(WAYS)]
            taken = trainers[way].step()
            if step >= 2:
                seconds[way].append(taken)
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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for num_ranks in (2,):
        measured = on_ranks(num_ranks, times, arguments.steps)
        slowest = {way: [max(step) for step in zip(*(of[way] for of in measured), strict=True)] for way in WAYS}
        # Steps of one turn share the machine's mood: compare them, not the medians of different minutes.
        ratios = {way: [a / b for a, b in zip(slowest[way], slowest["dense"], strict=True)] for way in WAYS}
        for way in WAYS:
            masks, peak = max(on_ranks(num_ranks, memory, way))
            rows.append(
                (
                    num_ranks,
                    way,
                    f"{1000 * _median(slowest[way]):.0f}",
                    f"{100 * (_median(ratios[way]) - 1):+.1f} %",
                    f"{masks / 2**20:.2f}",
                    f"{peak / 2**20:.0f}",
                )
            )
    columns = ("ranks", "way", "step ms", "over dense", "masks MiB a rank", "peak MiB a rank")
    text = (
        heading("A training step with half of the weights masked, on FSDP2", "python -m benchmarks.bench_training")
        + f"\n{NUM_LAYERS} transformer blocks of width {SIZE}, float32, AdamW, "
        f"{NUM_SAMPLES} x {NUM_TOKENS} tokens a rank.\n"
        f"Medians of {arguments.steps} steps, the slower rank's. The three models take turns in one process,\n"
        "and each step is compared with the dense step of its turn. Peaks are of building and training alone\n"
        "in a process of its own.\n\n" + table(columns, rows)
    )
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


if __name__ == "__main__":
    main()
