"""What calls take on a GPU, beside a copy of the same weights and torch's own prune module; each part by itself.

    PYTHONPATH=. python3 benchmarks/bench_kernels.py [--small] [--limit SECONDS]

Results are printed as they come. ``--small``: to see that it runs, also without a GPU.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import distprune as prune

LLAMA = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (5504, 2048), (5504, 2048), (2048, 5504)]
CALLS: dict[str, dict[str, Any]] = {
    "global": {"sparsity": 0.5},
    "each tensor": {"sparsity": 0.5, "scope": "tensor"},
    "random": {"sparsity": 0.5, "score": "random"},
    "taylor": {"sparsity": 0.5, "score": "taylor"},
    "2:4": {"pattern": "2:4"},
    "4:8": {"pattern": "4:8"},
    "row": {"sparsity": 0.5, "pattern": "row"},
    "block:16": {"sparsity": 0.5, "pattern": "block:16"},
    "channels:0": {"sparsity": 0.5, "pattern": "channels:0"},
    "a function": {"sparsity": 0.5, "score": torch.square},
}


class Bench:
    """Times calls on ``device``, and prints."""

    def __init__(self, device: torch.device, turns: int, limit: float) -> None:
        self.device, self._turns, self._end = device, turns, time.perf_counter() + limit
        self.is_gpu = device.type == "cuda"

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def ms(self, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> tuple[float, float]:
        """Return what the first call takes, which compiles, and the best of some after it."""
        times = []
        for _ in range(self._turns + 1):
            before()
            self.wait()
            started = time.perf_counter()
            call()
            self.wait()
            times.append((time.perf_counter() - started) * 1e3)
        return times[0], min(times[1:])

    def launches(self, call: Callable[[], object]) -> int:
        """Return how many kernels a call launches."""
        if not self.is_gpu:
            return 0
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            self.wait()
        return sum(event.count for event in profile.key_averages() if "Mem" not in event.key)

    def peak(self, call: Callable[[], object]) -> float:
        """Return how many MiB a call takes beside what is there."""
        if not self.is_gpu:
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
        call()
        self.wait()
        return (torch.cuda.max_memory_allocated() - there) / 2**20

    def part(self, what: str, call: Callable[[], object]) -> None:
        """Run one part; what fails is printed, and the next goes on."""
        if time.perf_counter() > self._end:
            print(f"left out, for time: {what}", flush=True)
            return
        try:
            call()
        except Exception:
            print(f"FAILED {what}: {traceback.format_exc(limit=-4)}", flush=True)
        if self.is_gpu:
            torch.cuda.empty_cache()


def model_of(shapes: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(i, o, bias=False, dtype=dtype) for o, i in shapes))


def selection(bench: Bench, shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> None:
    model = model_of(shapes, bench.device, dtype)
    parameters = [*model.parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    numel = sum(parameter.numel() for parameter in parameters)

    def restore() -> None:
        torch._foreach_copy_([parameter.data for parameter in parameters], kept)

    _, copy = bench.ms(restore)
    print(f"{str(dtype)[6:]}: {numel / 1e6:.0f} M weights in {len(parameters)}; copy {copy:.2f} ms", flush=True)
    for name, how in CALLS.items():

        def run(name: str = name, how: dict[str, Any] = how) -> None:
            if name == "taylor":
                for parameter in parameters:
                    parameter.grad = torch.randn_like(parameter)
            call = partial(prune.prune_model, model, include="*", **how)
            first, best = bench.ms(call, restore)
            restore()
            peak = bench.peak(call)
            restore()
            num = bench.launches(call)
            print(
                f"  {name:12s} {best:9.2f} ms = {best / copy:6.1f} copies; first {first:.0f} ms; "
                f"+{peak:.0f} MiB; {num} launches",
                flush=True,
            )
            for parameter in parameters:
                parameter.grad = None

        bench.part(name, run)


def beside_torch(bench: Bench, shapes: Sequence[tuple[int, int]]) -> None:
    model: Any = model_of(shapes, bench.device, torch.float32)
    pairs = [(layer, "weight") for layer in model]
    kept = [layer.weight.detach().clone() for layer in model]

    def restore() -> None:
        for layer, weight in zip(model, kept, strict=True):
            if torch_prune.is_pruned(layer):
                torch_prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
            layer.weight.data.copy_(weight)

    _, theirs = bench.ms(
        lambda: torch_prune.global_unstructured(pairs, torch_prune.L1Unstructured, amount=0.5), restore
    )
    restore()
    _, ours = bench.ms(lambda: prune.prune_model(model, 0.5, include="*"), restore)
    print(f"torch's global_unstructured {theirs:.2f} ms, prune_model {ours:.2f} ms", flush=True)


def holding(bench: Bench, shapes: Sequence[tuple[int, int]]) -> None:
    model: Any = model_of(shapes, bench.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = {
        size: torch.randn(4096, size, device=bench.device, dtype=torch.bfloat16) for size in {i for _, i in shapes}
    }

    def step() -> None:
        for layer in model:
            layer(tokens[layer.weight.shape[1]]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    _, dense = bench.ms(step)
    prune.prune_model(model, 0.5, include="*")
    hold = prune.hold_zeros(model, optimizer, include="*")
    _, held = bench.ms(step)
    numel = sum(parameter.numel() for parameter in model.parameters())
    zeros = sum(int((parameter == 0).sum()) for parameter in model.parameters())
    print(
        f"a step of {numel / 1e6:.0f} M bfloat16: {dense:.2f} ms, held {held:.2f} ms "
        f"(+{100 * (held / dense - 1):.1f} %); {100 * zeros / numel:.2f} % are zero",
        flush=True,
    )
    hold.remove()
    _, regrown = bench.ms(lambda: prune.hold_zeros(model, optimizer, include="*").regrow(0.1))
    print(f"zeros that are held anew, and a tenth that moves: {regrown:.1f} ms", flush=True)


def one_shot(bench: Bench, is_small: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, length, num = (64, 128, 32, 4) if is_small else (2048, 5504, 2048, 32)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=hidden // 16 // 4 * 2,
        num_key_value_heads=hidden // 16 // 4 * 2, vocab_size=512,
    )  # fmt: skip
    tokens = torch.randint(512, (num, length))
    for method in ("wanda", "sparsegpt", "admm"):

        def run(method: Any = method) -> None:
            torch.manual_seed(0)
            with torch.device(bench.device):
                model = LlamaForCausalLM(config).to(torch.bfloat16)
            bench.wait()
            started = time.perf_counter()
            prune.prune_blocks(model, tokens, method=method, pattern="2:4")
            bench.wait()
            print(f"one-shot {method} 2:4, a block: {(time.perf_counter() - started) / 2:.2f} s", flush=True)

        bench.part(method, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, 1 if args.small else 5, args.limit)
    name = torch.cuda.get_device_name() if bench.is_gpu else "no GPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    blocks = [(o // 512 * 16, i // 512 * 16) for o, i in LLAMA] if args.small else LLAMA * 22
    for dtype in (torch.float32, torch.bfloat16):
        bench.part(str(dtype), lambda dtype=dtype: selection(bench, blocks, dtype))  # type: ignore[misc]
    bench.part("torch", lambda: beside_torch(bench, blocks[: 7 * 6]))
    bench.part("holding", lambda: holding(bench, blocks))
    bench.part("one-shot", lambda: one_shot(bench, args.small))


if __name__ == "__main__":
    main()
