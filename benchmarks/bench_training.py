"""A training step of a pruned FSDP2 model, against the same step dense and against PyTorch's way.

PyTorch's way is ``torch.nn.utils.prune`` before ``fully_shard``: every rank keeps a whole float mask and
multiplies the gathered weight by it. Two ranks of one thread.

    python -m benchmarks.bench_training --output benchmarks/results/training_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from typing_extensions import override

import distprune as prune
from benchmarks.measure import heading, on_ranks, peak_memory, show, table
from distprune.masks.fsdp2 import _MaskedParam
from distprune.shards.fsdp2 import Fsdp2Params

NUM_LAYERS, SIZE, NUM_HEADS, NUM_SAMPLES, NUM_TOKENS = 4, 512, 8, 4, 256
# Freed memory stays with the process, as torch's allocators for accelerators keep it. Otherwise which
# operation pays for the page faults changes with every allocation before it, by more than masks cost.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}
WARM_UP = 8  # turns; until then the heap still grows, and a page fault costs as much as thousands of masked weights
# The second shows what is noise. "Zeros held" is in place, at a rate of 0: so zeros stay when its hooks are off.
WAYS = ("dense", "dense, again", "distprune", "zeros held", "torch before fully_shard")
OFF = {"distprune, switched off": "distprune", "zeros held, switched off": "zeros held"}


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
    if way == "zeros held":
        prune.prune_model(model, 0.5)
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
        # Fused: the others take twice as long for exact zeros on a CPU, which has nothing to do with masks.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0 if way == "zeros held" else 1e-4, fused=True)
        self.hold = prune.hold_zeros(self.model, self.optimizer) if way == "zeros held" else None
        generator = torch.Generator().manual_seed(rank)
        self.batch = torch.randn(NUM_SAMPLES, NUM_TOKENS, SIZE, generator=generator)

    def step(self) -> tuple[float, float]:
        """Return the seconds on the clock of the slowest rank, and those this rank's thread worked."""
        dist.barrier()
        clock, worked = time.perf_counter(), time.thread_time()
        cast(torch.Tensor, self.model(self.batch).square().mean()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds, worked = time.perf_counter() - clock, time.thread_time() - worked
        slowest = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest), worked


def switch(hooks: Mapping[Any, Any], *, masked: bool) -> None:
    """Let the masks of all parameters of ``hooks`` act, or none: the same tensors in the same places."""
    for param, of_gradient in hooks.items():
        param.__class__ = _MaskedParam if masked else FSDPParam
        param.sharded_param._post_accumulate_grad_hooks.clear()
        if masked:
            param.sharded_param._post_accumulate_grad_hooks.update(of_gradient)


class Hooks:
    """The hooks that hold zeros, which can be switched off."""

    def __init__(self, trainer: Trainer) -> None:
        optimizer = cast(Any, trainer.optimizer)
        registries = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        registries += [cast(Any, p)._post_accumulate_grad_hooks for p in trainer.model.parameters()]
        self._saved = [(registry, dict(registry)) for registry in registries if registry]

    def switch(self, *, on: bool) -> None:
        for registry, hooks in self._saved:
            registry.clear()
            if on:
                registry.update(hooks)


def times(rank: int, first: int, num_steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return the times of every step of every way, which take turns; what is built ``first`` changes places."""
    order = [*WAYS[first:], *WAYS[:first]]  # what is built first lies better in memory
    trainers = {way: Trainer(way, rank) for way in order}
    trainers.update({off: trainers[on] for off, on in OFF.items()})
    held = Hooks(trainers["zeros held"])
    found = Fsdp2Params()
    masked = [found.find(module, "weight_orig") for module in trainers["distprune"].model.modules()]
    params = [managed.param for managed in masked if managed is not None]
    hooks = {param: dict(param.sharded_param._post_accumulate_grad_hooks) for param in params}
    order += OFF
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in order}
    for turn in range(WARM_UP + num_steps):
        for way in order[:: 1 if turn % 2 else -1]:
            switch(hooks, masked=way != "distprune, switched off")
            held.switch(on=way != "zeros held, switched off")
            taken = trainers[way].step()
            if turn >= WARM_UP:
                seconds[way].append(taken)
        order.append(order.pop(0))
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
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--launches", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with patch.dict(os.environ, KEEP_MEMORY):
        launches = [on_ranks(2, times, i % len(WAYS), arguments.steps) for i in range(arguments.launches)]
    rows = []
    for way, base in (*((way, "dense") for way in WAYS), *((on, off) for off, on in OFF.items())):
        of_way, of_base = ([step for launch in launches for step in launch[0][name]] for name in (way, base))
        # Steps of one turn share the machine's mood: compare them, not the medians of different minutes.
        ratios = [100 * (pruned[0] / dense[0] - 1) for pruned, dense in zip(of_way, of_base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        worked = [
            sum(step[1] for step in of_rank[way]) / sum(step[1] for step in of_rank[base])
            for launch in launches
            for of_rank in launch
        ]
        masks, peak = max(on_ranks(2, memory, way))
        compared = way != base
        rows.append(
            (
                way,
                base if compared else "",
                f"{1000 * statistics.median(step[0] for step in of_way):.0f}",
                f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})" if compared else "",
                f"{100 * (statistics.mean(worked) - 1):+.1f} %" if compared else "",
                f"{masks / 2**20:.2f}",
                f"{peak / 2**20:.0f}",
            )
        )
    columns = ("way", "compared with", "step ms", "clock", "CPU", "masks MiB a rank", "peak MiB a rank")
    text = (
        heading("A training step with half of the weights masked, on FSDP2", "python -m benchmarks.bench_training")
        + f"\n{NUM_LAYERS} transformer blocks of width {SIZE}, float32, fused AdamW, "
        f"{NUM_SAMPLES} x {NUM_TOKENS} tokens a rank.\n"
        "All ways take turns in the same processes, and every step is compared with the one of its turn: by the\n"
        "clock of the slower rank (median, and quartiles), and by the time the ranks' threads worked (mean).\n"
        f"{arguments.launches} launches of {arguments.steps} turns, after {WARM_UP} that are not counted. "
        "Where its tensors happen to lie moves a model\nby a few percent, as dense against dense shows; so the last "
        "rows compare the pruned models with themselves,\ntheir masks or hooks switched off every other step. While "
        "the clock runs, freed memory stays with the process (glibc's mmap\nand trim thresholds). Peaks are of "
        "building and training alone.\n\n" + table(columns, rows)
    )
    show(text, arguments.output)


if __name__ == "__main__":
    main()
