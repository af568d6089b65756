"""Units and layers removed from SmolLM2-135M, without training: perplexity over dense, by criterion, on one process.

What goes is zeroed and not cut, which puts out the same. Runs what RESULTS.jsonl lacks and appends each run to it.

    python -m benchmarks.bench_removal RESULTS.jsonl --output benchmarks/results/removal_HARDWARE_DATE.md
    python -m benchmarks.bench_removal RESULTS.jsonl --seeds 0 --only OBS
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.bench_one_shot import EVALUATION_TOKENS, LENGTH, NUM_EVALUATED, write_texts
from benchmarks.measure import heading, table
from distprune.calibration import load_samples
from distprune.checkpoint.bundled import bundled_directory
from distprune.collectives import Alone
from distprune.evaluation import perplexity, tokenize_file
from distprune.models import decoder_blocks
from distprune.removal import choose_layers, choose_units, skipping

NUM_SAMPLES = 16
UNITS: dict[str, Any] = {
    "MLP width 1536 to 1152": {"mlp": 1152},
    "1 of 3 query heads of each group": {"heads": 6},
    "1 of 3 KV groups": {"kv_groups": 2},
}
LAYERS, NUM_LAYERS = "6 of 30 layers", 24
METHODS: dict[str, Any] = {
    "OBS, refitted": {},
    "OBS, refitted to the pruned model's own outputs": {"targets": "own"},
    "Taylor, refitted": {"criterion": "taylor"},
    "Minitron": {"criterion": "activation", "refit": "none"},
    "FLAP": {"criterion": "fluctuation", "refit": "none"},
    "Taylor": {"criterion": "taylor", "refit": "none"},
    "magnitude": {"criterion": "magnitude", "refit": "none"},
}
LAYER_METHODS: dict[str, Any] = {  # by which criterion layers go, and whether the others make up for them
    "loss, healed": ("loss", "dense"),
    "loss": ("loss", "own"),
    "influence (ShortGPT), healed": ("influence", "dense"),
    "influence (ShortGPT)": ("influence", "own"),
}


class Bench:
    def __init__(self, texts: Path) -> None:
        self._directory = bundled_directory(Alone())
        self._tokenizer = AutoTokenizer.from_pretrained(self._directory)
        self._texts = texts
        self._evaluated = [
            tokenize_file(self._tokenizer, path, max_tokens=EVALUATION_TOKENS, sequence_length=LENGTH)
            for path in sorted(texts.glob("evaluation*"))
        ]
        self._layers: dict[tuple[str, int], list[int]] = {}
        self.dense = self._perplexity(self._load())

    def run(self, what: str, method: str, seed: int, loss_samples: int) -> dict[str, Any]:
        model = self._load()
        calibration = self._texts / "calibration.txt"
        samples = load_samples(
            self._tokenizer, calibration, model, num_samples=NUM_SAMPLES, sequence_length=LENGTH, seed=seed
        )
        started = time.perf_counter()
        with ExitStack() as stack:
            if what != LAYERS:
                choose_units(model, samples, UNITS[what], **METHODS[method])
            else:
                criterion, targets = LAYER_METHODS[method]
                if (criterion, seed) not in self._layers:
                    some = samples[:: NUM_SAMPLES // loss_samples] if criterion == "loss" else samples
                    self._layers[criterion, seed] = choose_layers(model, some, NUM_LAYERS, criterion=criterion)
                layers = self._layers[criterion, seed]
                choose_units(model, samples, {}, layers=layers, targets=targets)
                stack.enter_context(skipping(model, set(range(len(decoder_blocks(model)))) - {*layers}))
            seconds = time.perf_counter() - started
            return {"perplexity": self._perplexity(model), "dense": self.dense, "seconds": seconds}

    def _load(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32).eval()

    def _perplexity(self, model: Any) -> float:
        found = [perplexity(model, ids, sequence_length=LENGTH) for ids in self._evaluated]
        return math.exp(statistics.fmean(map(math.log, found)))  # every text counts as many tokens


def read(results: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {(of["what"], of["method"], of["seed"]): of for of in map(json.loads, lines)}


def rows(entries: dict[tuple[str, str, int], dict[str, Any]]) -> list[list[str]]:
    """Return a row for each kind and method: the median over seeds, and the least and the greatest."""
    found = []
    for what, method in dict.fromkeys((what, method) for what, method, _ in entries):
        over = [of["perplexity"] / of["dense"] for (w, m, _), of in entries.items() if (w, m) == (what, method)]
        seconds = [of["seconds"] for (w, m, _), of in entries.items() if (w, m) == (what, method)]
        middle, least, greatest = (f"{fn(over):.3f}" for fn in (statistics.median, min, max))
        found.append([what, method, f"{middle} ({least} to {greatest})", f"{statistics.median(seconds):.0f}"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="run methods with this in their names")
    parser.add_argument("--loss-samples", type=int, default=NUM_SAMPLES, help="windows by which layers are tried")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [
        (what, method, seed)
        for seed in arguments.seeds
        for what in [*UNITS, LAYERS]
        for method in (LAYER_METHODS if what == LAYERS else METHODS)
        if arguments.only in f"{what}: {method}"
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))
        bench: Bench | None = None
        for what, method, seed in wanted:
            if (what, method, seed) in read(arguments.results):
                continue
            bench = bench or Bench(Path(folder))
            entry = {"what": what, "method": method, "seed": seed}
            entry |= bench.run(what, method, seed, arguments.loss_samples)
            print(f"{what}, {method}, seed {seed}: {entry['perplexity'] / entry['dense']:.3f} x dense", flush=True)
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
    notes = (
        f"The model is the bundled one, dequantized from 4 bits, in float32. Calibration: {NUM_SAMPLES} windows of "
        f"{LENGTH} tokens, drawn by the seed from every second State of the Union speech since 1990. Perplexity: of "
        f"the first {EVALUATION_TOKENS} tokens of each of {NUM_EVALUATED} others, as a multiple of the dense model's. "
        "No training. Medians over the seeds, and the least and the greatest. Seconds: of choosing and refitting, on "
        "one rank of one thread."
    )
    text = heading("Removal from SmolLM2-135M", f"python -m benchmarks.bench_removal {arguments.results.name}")
    columns = ["removed", "by", "x dense", "s"]
    text += f"\n{textwrap.fill(notes, 118)}\n\n{table(columns, rows(read(arguments.results)))}\n"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
