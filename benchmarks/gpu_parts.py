"""The parts of ``benchmarks/bench_gpu.py``: each prints lines of its report behind ``> ``.

PYTHONPATH=. python3 benchmarks/gpu_parts.py PART [--small]
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.utils import prune as torch_prune
from torch.profiler import ProfilerActivity, profile
from torch.sparse import to_sparse_semi_structured

import distprune as prune
from benchmarks.measure import table
from distprune.kernels import available
from distprune.oneshot import block as block_module

LLAMA = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (5504, 2048), (5504, 2048), (2048, 5504)]
_REPEATS = 20  # of a call in a graph
DEMO = Path(__file__).parents[1] / "build/demo/smollm2-135m"
CALLS: dict[str, dict[str, Any]] = {
    "sparsity=0.5": {"sparsity": 0.5},
    'scope="tensor"': {"sparsity": 0.5, "scope": "tensor"},
    'score="random"': {"sparsity": 0.5, "score": "random"},
    'score="taylor"': {"sparsity": 0.5, "score": "taylor"},
    'pattern="2:4"': {"pattern": "2:4"},
    'pattern="4:8"': {"pattern": "4:8"},
    'pattern="row"': {"sparsity": 0.5, "pattern": "row"},
    'pattern="block:16"': {"sparsity": 0.5, "pattern": "block:16"},
    'pattern="channels:0"': {"sparsity": 0.5, "pattern": "channels:0"},
    "score=torch.square": {"sparsity": 0.5, "score": torch.square},
}


def say(text: str) -> None:
    """Print lines of the report."""
    for line in text.rstrip("\n").split("\n"):
        print(f"> {line}", flush=True)


class Bench:
    """Times calls on the GPU, or ``is_small`` on the CPU."""

    def __init__(self, is_small: bool) -> None:
        self.is_small, self.device = is_small, torch.device("cpu" if is_small else "cuda")
        self.activities = [ProfilerActivity.CPU if is_small else ProfilerActivity.CUDA]

    def wait(self) -> None:
        if not self.is_small:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], object]) -> float:
        """Return the milliseconds of a call."""
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return (time.perf_counter() - started) * 1e3

    def best(self, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> tuple[float, float]:
        """Return what the first call takes, which compiles, and the best of five after it, of slow ones of fewer."""
        times: list[float] = []
        while len(times) < (1 if self.is_small else 6) and (len(times) < 2 or sum(times[1:]) < 3e3):
            before()
            times.append(self.timed(call))
        return times[0], min(times[1:] or times)

    def profiled(self, call: Callable[[], object]) -> tuple[int, float]:
        """Return how many kernels and copies a call launches, and how many milliseconds they take."""
        with profile(activities=self.activities) as profiled:
            call()
            self.wait()
        return busy(profiled)

    def peak(self, call: Callable[[], object]) -> float:
        """Return how many MiB a call takes beside what is there."""
        if self.is_small:
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        there = torch.cuda.memory_allocated()
        call()
        self.wait()
        return (torch.cuda.max_memory_allocated() - there) / 2**20


def busy(profiled: Any) -> tuple[int, float]:
    """Return how many kernels and copies ran, and their milliseconds; on the CPU, how many operations."""
    events = profiled.key_averages()
    if any(event.self_device_time_total for event in events):
        events = [event for event in events if event.device_type.name == "CUDA"]
    return sum(event.count for event in events), sum(event.self_device_time_total for event in events) / 1e3


def model_of(shapes: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(i, o, bias=False, dtype=dtype) for o, i in shapes))


def selection(bench: Bench) -> None:
    """Weights of a Llama of 22 blocks, put back between the calls."""
    shapes = [(16, 32), (16, 64)] if bench.is_small else LLAMA * 22
    rows: dict[str, list[str]] = {name: [f"`{name}`"] for name in CALLS}
    say(f"## Half of {sum(a * b for a, b in shapes) / 1e6:.0f} M weights in {len(shapes)} matrices, 2:4 and others\n")
    for dtype in (torch.float32, torch.bfloat16):
        model = model_of(shapes, bench.device, dtype)
        weights = [parameter.data for parameter in model.parameters()]
        kept = [weight.clone() for weight in weights]
        restore = partial(torch._foreach_copy_, weights, kept)
        _, copy = bench.best(restore)
        flat = torch.cat([weight.view(-1) for weight in weights[:24]])
        _, topk = bench.best(lambda flat=flat: flat.abs().topk(flat.numel() // 2, largest=False))  # type: ignore[misc]
        _, sort = bench.best(lambda flat=flat: flat.abs().sort())  # type: ignore[misc]
        say(
            f"{str(dtype)[6:]}: a copy takes {copy:.2f} ms; of {flat.numel() / 1e6:.0f} M of them "
            f"`torch.topk` {topk:.1f} ms, `torch.sort` {sort:.1f} ms."
        )
        del flat
        for name, how in CALLS.items():
            for parameter in model.parameters() if "taylor" in name else ():
                parameter.grad = torch.randn_like(parameter)
            call = partial(prune.prune_model, model, include="*", **how)
            first, best = bench.best(call, restore)
            restore()
            peak = bench.peak(call)
            restore()
            launches, ms = bench.profiled(call)
            rows[name] += [f"{best:.1f}", f"{best / copy:.1f}", f"{ms:.1f}"]
            rows[name] += [f"{launches:,}", f"{peak:.0f}", f"{first:.0f}"] if dtype is torch.bfloat16 else []
            print(*rows[name], flush=True)
            for parameter in model.parameters():
                parameter.grad = None
    columns = ("call", "float32, ms", "copies", "device, ms", "bfloat16, ms", "copies", "device, ms")
    say("\n" + table((*columns, "launches", "MiB", "first call, ms"), [*rows.values()]))
    _beside_torch(bench, shapes[: 7 * 6])


def _beside_torch(bench: Bench, shapes: Sequence[tuple[int, int]]) -> None:
    model = model_of(shapes, bench.device, torch.float32)
    pairs = [(layer, "weight") for layer in model]
    kept = [layer.weight.detach().clone() for layer in model]

    def restore() -> None:
        for layer, weight in zip(model, kept, strict=True):
            if torch_prune.is_pruned(layer):
                torch_prune.remove(layer, "weight")  # type: ignore[no-untyped-call]
            layer.weight.data.copy_(weight)

    theirs = partial(torch_prune.global_unstructured, pairs, torch_prune.L1Unstructured, amount=0.5)
    _, torch_ms = bench.best(theirs, restore)
    restore()
    _, ours = bench.best(lambda: prune.prune_model(model, 0.5, include="*"), restore)
    numel = sum(weight.numel() for weight in kept) / 1e6
    say(f"\n{numel:.0f} M float32: `torch.nn.utils.prune.global_unstructured` {torch_ms:.1f} ms, here {ours:.1f} ms.")


def llama(bench: Bench, num_blocks: int, dtype: torch.dtype, vocabulary: int = 32_000, **sizes: int) -> Any:
    """Return a Llama with random weights and blocks of 2,048 and 5,504 channels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, inner, heads = (16, 32, 2) if bench.is_small else (2048, 5504, 16)
    default = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    default |= {"num_key_value_heads": heads // 2, "vocab_size": 64 if bench.is_small else vocabulary}
    config = LlamaConfig(**(default | sizes), num_hidden_layers=num_blocks, max_position_embeddings=4096)
    torch.manual_seed(0)
    with torch.device(bench.device):
        return LlamaForCausalLM(config).to(dtype)


def tokens_of(model: Any, num: int, length: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (num, length), generator=torch.Generator().manual_seed(0))


def training(bench: Bench) -> None:
    """A step of a model of 1.1 billion, dense and with held zeros, and updates."""
    model = llama(bench, 1 if bench.is_small else 22, torch.float32 if bench.is_small else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    tokens = tokens_of(model, 2, 32 if bench.is_small else 2048).to(bench.device)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    _, dense = bench.best(step)
    dense_launches, dense_busy = bench.profiled(step)
    prune.prune_model(model, 0.5)
    hold = prune.hold_zeros(model, optimizer)
    _, held = bench.best(step)
    launches, busy_ms = bench.profiled(step)
    numel, zeros = (sum(int(num(p)) for p in model.parameters()) for num in (torch.numel, lambda p: (p == 0).sum()))
    grown = bench.best(lambda: hold.regrow(0.1))[1]
    hold.remove()
    trained = prune.SparseTraining(model, optimizer, schedule=lambda step: min(0.9, 0.5 + step / 100))
    _, updated = bench.best(step)
    shares = [update.sparsity for update in trained.updates]
    rows = [
        ("dense", f"{dense:.1f}", "", f"{dense_busy:.1f}", dense_launches),
        ("zeros held", f"{held:.1f}", f"{100 * (held / dense - 1):+.1f} %", f"{busy_ms:.1f}", launches),
        ("zeros held, pruned further before the step", f"{updated:.1f}", f"{updated - held:+.1f} ms", "", ""),
        ("`hold.regrow(0.1)` alone", f"{grown:.1f}", "", "", ""),
    ]
    say(f"## A training step of {numel / 1e9:.2f} B weights in {str(next(model.parameters()).dtype)[6:]}\n")
    say(
        f"AdamW, clipped, 2 windows of {tokens.shape[1]:,} tokens; {100 * zeros / numel:.1f} % of all weights are zero "
        f"after it, updates go to {100 * shares[-1]:.0f} % of those pruned.\n"
    )
    say(table(("step", "ms", "more", "on the device, ms", "launches"), rows))


class _Enough(Exception):
    """Enough blocks were pruned."""


@contextmanager
def clock(bench: Bench, seconds: dict[str, float], stage: str) -> Iterator[None]:
    """As the clock of reports, which does not wait for the device."""
    bench.wait()
    started = time.perf_counter()
    yield
    bench.wait()
    seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started


def one_shot(bench: Bench) -> None:
    """Four blocks of 2,048 and 5,504 channels: the second is timed, the third profiled."""
    say("## One-shot, a block of 2,048 and 5,504 channels in bfloat16, 32 windows of 2,048 tokens\n")
    alone = {"refit": "none", "permute": "none"}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("Wanda 2:4", {"method": "wanda", "pattern": "2:4"}),
        ("SparseGPT 2:4", {"method": "sparsegpt", "pattern": "2:4"}),
        ("ADMM 2:4 alone", {"pattern": "2:4", **alone}),
        ("by default, 2:4", {"pattern": "2:4"}),
        ("SparseGPT 50 %", {"method": "sparsegpt", "sparsity": 0.5}),
        ("by default, 50 %", {"sparsity": 0.5}),
    ]
    rows: dict[str, list[str]] = {name: [name] for name, _ in ways}
    for num, (name, how) in [(32, way) for way in ways] + [(128, way) for way in ways[: 0 if bench.is_small else 4]]:
        model = llama(bench, 4, torch.float32 if bench.is_small else torch.bfloat16, vocabulary=512)
        tokens = tokens_of(model, num // 8 if bench.is_small else num, 32 if bench.is_small else 2048)
        at, stages, profiler = list[float](), dict[str, float](), profile(activities=bench.activities)

        def on_block(i: int, report: Any, at: Any = at, stages: Any = stages, profiler: Any = profiler) -> None:
            bench.wait()
            at.append(time.perf_counter())
            if i == 1:
                stages |= report.seconds
                profiler.start()
            if i == 2:
                profiler.stop()
                raise _Enough

        if not bench.is_small:
            torch.cuda.reset_peak_memory_stats()
        with suppress(_Enough), patch.object(block_module, "clock", partial(clock, bench)):
            prune.prune_blocks(model, tokens, on_block=on_block, **how)
        launches, ms = busy(profiler)
        peak = 0.0 if bench.is_small else torch.cuda.max_memory_allocated() / 2**30
        parts = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in stages.items() if seconds >= 0.005)
        print(num, name, f"{at[1] - at[0]:.2f}", parts, f"{ms / 1e3:.2f}", f"{launches:,}", f"{peak:.1f}", flush=True)
        rows[name] += [f"{at[1] - at[0]:.2f}"]
        rows[name] += [parts, f"{ms / 1e3:.2f}", f"{launches:,}"] if num == 32 else []
        rows[name] += [f"{peak:.1f}"]
        del model
    columns = ("method", "s a block", "of it", "device, s", "launches", "GiB", "128 windows, s a block", "GiB")
    say(table(columns, [[*row, *[""] * (len(columns) - len(row))] for row in rows.values()]))


def demo(bench: Bench) -> None:
    """The demo's model by default, or one of its sizes with random weights."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"head_dim": 64, "tie_word_embeddings": True}
    is_there = DEMO.exists() and not bench.is_small
    what = "SmolLM2-135M" if is_there else "A model of SmolLM2-135M's sizes, random weights"
    say(f"## {what}, float32, 2:4 by default\n")
    say(table(("windows", "own words, s", "pruning, s", "first block, s", "the others, each"), []))
    for num, length, num_words in [(2, 64, 2)] if bench.is_small else [(16, 256, 96), (64, 1024, 96)]:
        if is_there:
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(DEMO).to(bench.device)
        else:
            num_blocks, more = (2, {}) if bench.is_small else (30, sizes)
            model = llama(bench, num_blocks, torch.float32, vocabulary=49_152, **more)
        text, words, done = tokens_of(model, num, length), list[torch.Tensor](), list[float]()
        prompts = text[:, :32].repeat(6, 1)[: num_words // 2]
        written = bench.timed(lambda: words.append(prune.own_words(model, num_words, length, prompts=prompts)))  # noqa: B023
        started = time.perf_counter()
        tokens = torch.cat([text, *words])
        note = lambda *_, done=done: done.append(time.perf_counter())  # noqa: E731
        pruned = bench.timed(partial(prune.prune_blocks, model, tokens, pattern="2:4", on_block=note))
        times = [written / 1e3, pruned / 1e3, done[0] - started, (done[-1] - done[0]) / (len(done) - 1)]
        row = [f"{num} x {length}, and {num_words} own", *(f"{seconds:.2f}" for seconds in times)]
        say(table(row, []).split("\n")[0])
        print(f"{100 * prune.sparsity(model):.1f} % are zero", flush=True)


def two_four(bench: Bench) -> None:
    """A linear layer with a 2:4 weight, dense and as torch's sparse tensor, at several numbers of tokens."""
    say("## 2:4 by `torch.sparse.to_sparse_semi_structured`\n")
    if bench.is_small or torch.cuda.get_device_capability() < (8, 0):
        say("Needs a GPU of compute capability 8.0 or later.")
        return
    warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor is in prototype stage")
    num_out, num_in, rows = 14336, 4096, []
    module = nn.Linear(num_in, num_out, bias=False, device=bench.device, dtype=torch.bfloat16)
    prune.prune_model(module, pattern="2:4")
    weights = [module.weight.detach(), to_sparse_semi_structured(module.weight.detach())]
    for num_tokens in (1, 16, 256, 4096):
        x = torch.randn(num_tokens, num_in, device=bench.device, dtype=torch.bfloat16)
        calls = [partial(nn.functional.linear, x, weight) for weight in weights]
        torch.testing.assert_close(calls[1](), calls[0](), rtol=2e-2, atol=2e-1)
        dense, sparse = (bench.best(_graph(call).replay)[1] * 1e3 / _REPEATS for call in calls)
        rows.append((f"{num_out} x {num_in}", num_tokens, f"{dense:.1f}", f"{sparse:.1f}", f"{dense / sparse:.2f}"))
    say(table(("bfloat16 weight", "tokens", "dense, us", "2:4, us", "times as fast"), rows))


def _graph(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph that makes the call ``_REPEATS`` times."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            call()
    return graph


def main() -> None:
    name, *options = sys.argv[1:]
    bench = Bench("--small" in options)
    if bench.is_small and find_spec("triton") is not None and find_spec("pytest") is not None:
        import_module("tests.kernels.interpreted")
        available._DEVICES = ("cpu",)
    if name in ("training", "one_shot", "demo") and find_spec("transformers") is None:
        say(f"{name}: left out, transformers is missing")
        return
    globals()[name](bench)


if __name__ == "__main__":
    main()
