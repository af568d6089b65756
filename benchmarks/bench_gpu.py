"""Every method on CUDA against the CPU, selection against the memory's bandwidth, 2:4 matmuls, and a whole model.

python -m benchmarks.bench_gpu [--output benchmarks/results/FILE.md]

Without a GPU it says so and ends. ``--device cpu`` runs all of it small, on the CPU: to see that it runs.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.sparse import to_sparse_semi_structured

import distprune as prune
from benchmarks.measure import heading, table
from distprune.oneshot.prune_blocks import prune_blocks

Call = Callable[[nn.Module], object]

METHODS: dict[str, Call] = {
    "magnitude": lambda m: prune.prune_model(m, 0.5),
    "magnitude, each tensor": lambda m: prune.prune_model(m, 0.5, scope="tensor"),
    "random": lambda m: prune.prune_model(m, 0.5, score="random", seed=1),
    "row": lambda m: prune.prune_model(m, 0.5, pattern="row"),
    "2:4": lambda m: prune.prune_model(m, pattern="2:4"),
    "block:16": lambda m: prune.prune_model(m, 0.5, pattern="block:16"),
    "channels:0": lambda m: prune.prune_model(m, 0.5, pattern="channels:0"),
    "l1_unstructured": lambda m: prune.l1_unstructured(first(m), "weight", 0.5),
    "ln_structured, n=2": lambda m: prune.ln_structured(first(m), "weight", 0.5, 2, 1),
    "ln_structured, n=2.5": lambda m: prune.ln_structured(first(m), "weight", 0.5, 2.5, 1),
    "random_structured": lambda m: prune.random_structured(first(m), "weight", 0.5, 0, seed=1),
}


def first(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if isinstance(module, nn.Linear))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [module.weight for module in model.modules() if isinstance(module, nn.Linear)]


class Clock:
    """Seconds of a call on ``device``, which is waited for before and after."""

    def __init__(self, device: torch.device, turns: int) -> None:
        self._device = device
        self._turns = turns

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def median(self, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
        times = []
        for _ in range(self._turns + 1):  # the first one warms up
            before()
            self.wait()
            started = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])


def methods(device: torch.device, size: int) -> str:
    """Compare every method's weights with the CPU's."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(size, 3 * size), nn.Linear(3 * size, size)).to(dtype)
        for name, call in METHODS.items():
            here, there = copy.deepcopy(model), copy.deepcopy(model).to(device)
            call(here)
            started = time.perf_counter()
            call(there)
            took = time.perf_counter() - started
            pairs = zip(weights(here), weights(there), strict=True)
            answer = "equal" if all(torch.equal(one, other.cpu()) for one, other in pairs) else "DIFFERENT"
            rows.append((str(dtype).removeprefix("torch."), name, answer, f"{took * 1e3:.1f}"))
    return "## Against the CPU\n\n" + table(("dtype", "method", "weights", "ms, the first call"), rows)


def selection(device: torch.device, clock: Clock, numel: int) -> str:
    """Time the in-place call beside one copy of the weights, which is what the memory can do, and torch's calls."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        drawn = torch.randn(numel // 4096, 4096, device=device).to(dtype)
        module = nn.Linear(1, 1, bias=False)
        module.weight = nn.Parameter(drawn.clone())
        weight, beside = module.weight.detach(), torch.empty_like(drawn)
        lowest = partial(torch.topk, k=numel // 2, largest=False)
        calls: dict[str, Callable[[], object]] = {
            "a copy of the weights": partial(beside.copy_, weight),
            "prune_model": partial(prune.prune_model, module, 0.5),
            "torch.topk": partial(_of_magnitudes, weight, lowest),
            "torch.sort": partial(_of_magnitudes, weight, torch.sort),
        }
        num_bytes = 2 * numel * drawn.element_size()  # a read and a write
        bandwidth = 0.0
        for name, call in calls.items():
            seconds = clock.median(call, partial(weight.copy_, drawn))
            bandwidth = bandwidth or num_bytes / seconds
            share = num_bytes / seconds / bandwidth
            rows.append((str(dtype).removeprefix("torch."), name, f"{seconds * 1e3:.2f}", f"{share:.3f}"))
    columns = ("dtype", "what", "ms", "share of the copy's bandwidth")
    title = f"\n## Half of {numel:,} weights\n\nOne read and one write are counted for each; the goal is 0.5.\n\n"
    return title + table(columns, rows)


def _of_magnitudes(weight: torch.Tensor, call: Callable[[torch.Tensor], object]) -> object:
    return call(weight.view(-1).abs())


def semi_structured(device: torch.device, clock: Clock, size: int) -> str:
    """Time a matmul with a 2:4 weight, dense and as torch's sparse tensor."""
    title = "\n## 2:4 through to_sparse_semi_structured\n\n"
    if device.type != "cuda":
        return title + "Needs CUDA.\n"
    module = nn.Linear(size, size, bias=False, device=device, dtype=torch.float16)
    prune.prune_model(module, pattern="2:4")
    x, dense = torch.randn(size, size, device=device, dtype=torch.float16), module.weight.detach()
    sparse = to_sparse_semi_structured(dense)
    torch.testing.assert_close(torch.mm(sparse, x), torch.mm(dense, x), rtol=1e-2, atol=1e-1)
    seconds = [clock.median(partial(torch.mm, weight, x)) for weight in (dense, sparse)]
    rows = [(f"{size} x {size}", *(f"{each * 1e3:.3f}" for each in seconds), f"{seconds[0] / seconds[1]:.2f}")]
    return title + table(("float16 matmul", "dense ms", "2:4 ms", "times as fast"), rows)


def one_shot(device: torch.device, clock: Clock, *, small: bool) -> str:
    """Prune a Llama-like model with random weights in one shot."""
    title = "\n## One-shot pruning, random weights\n\n"
    if importlib.util.find_spec("transformers") is None:
        return title + "Needs transformers.\n"
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = (64, 128, 2, 4, 256) if small else (2048, 5504, 22, 16, 32_000)  # about 1.1 billion
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    config = LlamaConfig(**dict(zip(names, sizes, strict=True)), max_position_embeddings=2048)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config).to(torch.float32 if small else torch.bfloat16).eval()
        samples = torch.randint(0, sizes[-1], (4, 32) if small else (128, 2048))
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = []
    for method, pattern, sparsity in (("wanda", "2:4", None), ("sparsegpt", "2:4", None), ("sparsegpt", "row", 0.5)):
        model.load_state_dict(weights, strict=False)
        clock.wait()
        started = time.perf_counter()
        prune_blocks(model, samples.cpu(), method=method, pattern=pattern, sparsity=sparsity)  # type: ignore[arg-type]
        clock.wait()
        rows.append((method, pattern, f"{time.perf_counter() - started:.1f}", f"{prune.sparsity(model):.4f}"))
    num = sum(parameter.numel() for parameter in model.parameters())
    text = f"{num:,} parameters, {samples.shape[0]} samples of {samples.shape[1]} tokens.\n\n"
    return title + text + table(("method", "pattern", "seconds", "sparsity"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("There is no GPU here. python -m benchmarks.bench_gpu --device cpu runs all of it small.")
        return
    device, small = torch.device(arguments.device), arguments.device == "cpu"
    clock = Clock(device, 1 if small else arguments.turns)
    text = heading("Pruning on a GPU", f"python -m benchmarks.bench_gpu --device {arguments.device}")
    text += f"- Device: {'the CPU, small' if small else torch.cuda.get_device_properties(device).name}\n\n"
    parts: list[Callable[[], str]] = [
        lambda: methods(device, 64 if small else 2048),
        lambda: selection(device, clock, 1 << 16 if small else 1 << 29),
        lambda: semi_structured(device, clock, 8192),
        lambda: one_shot(device, clock, small=small),
    ]
    for part in parts:
        text += (found := part())
        print(found, flush=True)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
