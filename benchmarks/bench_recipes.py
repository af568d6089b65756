"""What sparse training gives on real text, at equal steps: bits per byte of speeches that were not trained on.

A small Llama reads bytes of State of the Union speeches. Every way trains for the same steps on the
same windows; the model of equal parameters is dense, and as large as what the others keep.

    python -m benchmarks.bench_recipes --output benchmarks/results/recipes_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn

import distprune as prune
from benchmarks.measure import heading, on_ranks, show, table, unpin
from launch.demo_inputs import joined, speech_files

SPARSITY = 0.8
WIDTH, HIDDEN, NUM_HEADS = 144, 384, 4
LENGTH, NUM_EVALUATED = 128, 1024
RATE, WARM_UP = 3e-3, 100
DENSE, SMALL = "dense", "dense, of as many parameters as are kept"
LATE, GRADUAL = "one-shot at half of the steps", "gradual"
STATIC, RIGL, SET = "from the start, never moved", "from the start, RigL", "from the start, SET"
SR_STE = "from the start, SR-STE"
AT_END = "one-shot at the end"  # what the dense one becomes
WAYS = (DENSE, STATIC, SET, RIGL, SR_STE, GRADUAL, SMALL, LATE)


def speeches() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to train on, and those of every tenth speech."""
    paths = speech_files()
    held_out = paths[5::10]
    texts = joined(path for path in paths if path not in held_out), joined(held_out)
    first, second = (torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in texts)
    return first, second


def build(way: str, num_layers: int) -> nn.Module:
    """Return the Llama; the small one is half as wide, and as high in its MLP as parameters allow."""
    width, hidden = WIDTH, HIDDEN
    if way == SMALL:
        width = WIDTH // 2
        kept = (1 - SPARSITY) * num_layers * (4 * WIDTH**2 + 3 * WIDTH * HIDDEN) + 256 * (WIDTH - width)
        hidden = round((kept / num_layers - 4 * width**2) / (3 * width))
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )
    return cast(nn.Module, transformers.LlamaForCausalLM(config))


def windows(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(LENGTH)]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: torch.Tensor) -> float:
    starts = torch.linspace(0, len(text) - LENGTH, NUM_EVALUATED).long()
    losses = [loss_of(model, windows(text, some)) for some in torch.split(starts, 32)]
    return float(torch.stack(losses).double().mean()) / math.log(2)


def training_of(way: str, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    schedules: dict[str, dict[str, Any]] = {
        LATE: {"schedule": prune.at_once(SPARSITY, step=num_steps // 2)},
        GRADUAL: {"schedule": prune.cubic(SPARSITY, start=num_steps // 10, stop=num_steps * 7 // 10, every=20)},
        STATIC: {},
        RIGL: {"regrow": prune.Regrow(stop=num_steps * 3 // 4, every=50, by="gradient")},
        SET: {"regrow": prune.Regrow(stop=num_steps * 3 // 4, every=50)},
    }
    if way == SR_STE:
        return prune.StraightThrough(model, optimizer, pattern=prune.Unstructured(prune.erk(model, SPARSITY), "tensor"))
    if way not in schedules:
        return None
    always = {name: prune.constant(share) for name, share in prune.erk(model, SPARSITY).items()}
    return prune.SparseTraining(model, optimizer, **{"schedule": always, **schedules[way]})


def train(_: int, way: str, seed: int, num_layers: int, num_samples: int, num_steps: int) -> dict[str, Any]:
    """Train by one way, and return the bits per byte at the end, and what is not zero."""
    unpin()  # nothing is timed: whichever core is free
    text, held_out = speeches()
    torch.manual_seed(seed)
    model = build(way, num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARM_UP, 0.5 * (1.02 + 0.98 * math.cos(math.pi * step / num_steps))),
    )
    training = training_of(way, model, optimizer, num_steps)
    generator = torch.Generator().manual_seed(seed)
    started = time.perf_counter()
    for step in range(num_steps):
        starts = torch.randint(len(text) - LENGTH, (num_samples,), generator=generator)
        loss = loss_of(model, windows(text, starts))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if step % 200 == 0:
            print(f"{way}, seed {seed}, step {step}: {loss.item() / math.log(2):.3f} bits", flush=True)
    result: dict[str, Any] = {"seconds": time.perf_counter() - started, "ways": {}}
    if training is not None:
        training.finish()
    result["ways"][way] = bits_per_byte(model, held_out), _num_kept(model)
    if way == DENSE:
        prune.prune_model(model, SPARSITY)
        result["ways"][AT_END] = bits_per_byte(model, held_out), _num_kept(model)
    return result


def _num_kept(model: nn.Module) -> int:
    return sum(int(parameter.count_nonzero()) for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16, help="a step")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    ways: dict[str, list[tuple[float, int]]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [(way, seed) for seed in range(arguments.seeds) for way in arguments.ways]
        for result in pool.map(
            lambda run: on_ranks(1, train, *run, arguments.layers, arguments.samples, arguments.steps)[0], runs
        ):
            for way, measured in result["ways"].items():
                ways.setdefault(way, []).append(measured)
                print(f"{way}: {measured[0]:.3f} bits per byte, {result['seconds']:.0f} s", flush=True)
    rows = [
        (way, f"{measured[0][1]:,}", " ".join(f"{bits:.3f}" for bits, _ in measured), f"{_mean(measured):.3f}")
        for way, measured in sorted(ways.items(), key=lambda item: _mean(item[1]))
    ]
    notes = (
        f"A Llama of bytes ({arguments.layers} layers of width {WIDTH}, MLP {HIDDEN}) on the State of the Union "
        f"speeches but every tenth, which is evaluated on ({NUM_EVALUATED:,} windows of {LENGTH} bytes). All ways take "
        f"{arguments.steps:,} steps of {arguments.samples} x {LENGTH} bytes, the same for a seed; AdamW at {RATE}, "
        f"warmed up for {WARM_UP} steps, then a cosine to a hundredth, clipped to 1; nothing was tuned for one. The "
        f"sparse ones end with {SPARSITY:.0%} zeros in the layers; embeddings stay. Gradual: cubic, from a tenth to "
        "seven tenths of the steps, all weights in competition. Those that are sparse from the start have their zeros "
        "shared by ERK; RigL (by gradient) and SET (by chance) move 30 % of the kept weights, falling to none, every "
        "50 steps until three quarters of them; SR-STE chooses anew at every step, of weights that all go on learning."
    )
    sizes = ("layers", "samples", "steps", "seeds")
    options = " ".join(f"--{name} {getattr(arguments, name)}" for name in sizes)
    if tuple(arguments.ways) != WAYS:
        options += f" --ways {shlex.join(arguments.ways)}"
    text = heading("Sparse training on real text", f"python -m benchmarks.bench_recipes {options}")
    text += "\n" + textwrap.fill(notes, 118) + "\n\n"
    text += table(("way", "weights that are not zero", "bits per byte, by seed", "mean"), rows)
    show(text, arguments.output)


def _mean(measured: Sequence[tuple[float, int]]) -> float:
    return sum(bits for bits, _ in measured) / len(measured)


if __name__ == "__main__":
    main()
