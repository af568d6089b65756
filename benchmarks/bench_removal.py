"""Units and layers removed from SmolLM2-135M, without training: perplexity over dense, on 1 and 2 ranks.

What goes is zeroed, which puts out the same as what is cut; in the rows of a budget it is cut. Runs what RESULTS.jsonl
lacks and appends each run to it; layers, which take long to choose, are chosen once for each seed and criterion.

    python -m benchmarks.bench_removal RESULTS.jsonl --output benchmarks/results/removal_HARDWARE_DATE.md
    python -m benchmarks.bench_removal RESULTS.jsonl --seeds 0 --only OBS
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import textwrap
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.bench_one_shot import append
from benchmarks.measure import heading, on_ranks, shard, show, spread, table, unpin
from benchmarks.texts import ABOUT, KINDS, LENGTH, over_dense, perplexities, write_calibration
from distprune.calibration.data import calibration_windows
from distprune.calibration.own_words import own_words
from distprune.jobs.own_words import OWN_WORDS, mixed
from distprune.models.decoder_blocks import decoder_blocks
from distprune.removal.choose_units import choose_units
from distprune.removal.layers import order_layers, skipping
from distprune.removal.shrink_model import shrink_model
from launch.demo_inputs import demo_model

NUM_SAMPLES = 16
UNITS: dict[str, Any] = {
    "MLP width 1536 to 1152": {"mlp": 1152},
    "1 of 3 query heads of each group": {"heads": 6},
    "1 of 3 KV groups": {"kv_groups": 2},
}
LAYERS, NUM_LAYERS = "6 of 30 layers", 24
OWN = ", with own words"
LEAST_SQUARES, BLOCK = {"refit": "least_squares"}, {"refit": "block"}  # the default of a job: own words, and "block"
METHODS: dict[str, Any] = {
    f"OBS, blocks fitted{OWN}": BLOCK,
    f"OBS, least squares{OWN}": LEAST_SQUARES,
    "OBS, blocks fitted": BLOCK,
    "OBS, least squares": LEAST_SQUARES,
    "OBS, least squares towards the dense model": {"targets": "dense", **LEAST_SQUARES},
    "OBS, least squares to the pruned model's own outputs": {"targets": "own"},
    "Taylor, least squares towards the dense model": {"criterion": "taylor", "targets": "dense", **LEAST_SQUARES},
    "Minitron": {"criterion": "activation", "refit": "none"},
    "FLAP": {"criterion": "fluctuation", "refit": "none"},
    "Taylor": {"criterion": "taylor", "refit": "none"},
    "magnitude": {"criterion": "magnitude", "refit": "none"},
}
LAYER_METHODS: dict[str, Any] = {  # by which criterion layers go, and how the others make up for them
    f"loss, blocks fitted{OWN}": ("loss", BLOCK),
    f"loss, least squares{OWN}": ("loss", LEAST_SQUARES),
    "loss, least squares": ("loss", LEAST_SQUARES),
    "loss": ("loss", {"targets": "own"}),
    f"influence (ShortGPT), blocks fitted{OWN}": ("influence", BLOCK),
    f"influence (ShortGPT), least squares{OWN}": ("influence", LEAST_SQUARES),
    "influence (ShortGPT), least squares": ("influence", LEAST_SQUARES),
    "influence (ShortGPT)": ("influence", {"targets": "own"}),
}
BUDGET, SHARE = "20 % of the blocks' parameters", 0.2
BUDGET_METHODS: dict[str, Any] = {  # what ``shrink_model`` is asked for; the budget where there is nothing
    "a budget, divided by measured cost": {},
    "MLP width 1536 to 1126": {"mlp": 1126},
    "6 of 30 layers, by influence": {"layers": 24},
    "1 of 3 KV groups stays (16.7 %)": {"kv_groups": 1},
    "1 of 3 query heads stays (12.5 %)": {"heads": 3},
}
METHODS_OF = {**dict.fromkeys(UNITS, METHODS), LAYERS: LAYER_METHODS, BUDGET: BUDGET_METHODS}


@dataclass(frozen=True)
class Case:
    """One run: what is removed, how, by which windows, and on how many ranks."""

    what: str
    method: str
    seed: int
    ranks: int


@dataclass(frozen=True)
class Known:
    """What an earlier run has found out: the dense model's perplexity, and which layers stay."""

    dense: dict[str, float] | None
    layers: list[int] | None


def run(_: int, case: Case, texts: Path, known: Known, loss_samples: int) -> dict[str, Any]:
    """Choose, refit and evaluate, and return what is found, on this rank."""
    if case.ranks == 1:
        unpin()
    directory = demo_model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    shard(model)
    calibration = texts / "calibration.txt"
    samples = calibration_windows(calibration, tokenizer, NUM_SAMPLES, LENGTH, case.seed)
    some = samples[:: NUM_SAMPLES // loss_samples]
    if case.method.endswith(OWN):
        samples = with_own_words(model, tokenizer, samples, texts, case.seed)
        some = samples[:: len(samples) // (2 * loss_samples) + 1]  # 8 of 112, of each kind of window
    found: dict[str, Any] = {"dense": known.dense or perplexities(model, tokenizer)}
    with ExitStack() as stack:
        if case.what == BUDGET:
            num_all = sum(parameter.numel() for parameter in model.parameters())
            of_blocks = sum(p.numel() for _, block in decoder_blocks(model) for p in block.parameters())
            asked = BUDGET_METHODS[case.method] or {"parameters": num_all - round(SHARE * of_blocks)}
            started = time.perf_counter()
            shrunk = shrink_model(model, samples, **asked, layer_criterion="influence")
            found["removed"] = (num_all - shrunk.num_parameters) / of_blocks
            if shrunk.division is not None:
                found |= {"sizes": str(shrunk.division.sizes), "trials": list(map(asdict, shrunk.division.trials))}
        elif case.what != LAYERS:
            started = time.perf_counter()
            choose_units(model, samples, UNITS[case.what], **METHODS[case.method])
        else:
            criterion, refitted = LAYER_METHODS[case.method]
            by = some if criterion == "loss" else samples
            gone = order_layers(model, by, NUM_LAYERS, criterion=criterion) if not known.layers else ()
            layers = known.layers or sorted({*range(len(decoder_blocks(model)))} - {*gone})
            found |= {"layers": layers, "loss_samples": loss_samples}
            started = time.perf_counter()
            choose_units(model, samples, {}, layers=layers, **refitted)
            stack.enter_context(skipping(model, set(range(len(decoder_blocks(model)))) - {*layers}))
        seconds = time.perf_counter() - started
        return found | {"perplexity": perplexities(model, tokenizer), "seconds": seconds}


def with_own_words(model: Any, tokenizer: Any, samples: torch.Tensor, texts: Path, seed: int) -> torch.Tensor:
    """Return ``samples`` and what the model writes beside them in a job; kept beside the texts for other runs."""
    path = texts / f"own_words{seed}.pt"
    if not path.exists():
        num = OWN_WORDS // 2  # as in a job, these continue the text
        begun = calibration_windows(texts / "calibration.txt", tokenizer, num, 32, seed)
        words = own_words(model, OWN_WORDS, LENGTH, prompts=begun, seed=seed, tokenizer=tokenizer)
        torch.save([words[:num], words[num:]], path.with_suffix(f".{os.getpid()}"))
        path.with_suffix(f".{os.getpid()}").replace(path)
    return mixed([samples, *torch.load(path)])


def read(results: Path) -> dict[Case, dict[str, Any]]:
    """Return what has been run, by case."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    names = [field.name for field in fields(Case)]
    return {Case(**{name: of[name] for name in names}): of for of in map(json.loads, lines)}


def known_of(case: Case, entries: dict[Case, dict[str, Any]], loss_samples: int) -> Known:
    """Return what ``entries`` tell: which layers go does not depend on the number of ranks, nor on the fit."""
    dense = [of["dense"] for other, of in entries.items() if other.ranks == case.ranks]
    layers = [
        of["layers"]
        for other, of in entries.items()
        if case.what == other.what == LAYERS
        and (other.seed, of["loss_samples"]) == (case.seed, loss_samples)
        and (LAYER_METHODS[other.method][0], other.method.endswith(OWN))
        == (LAYER_METHODS[case.method][0], case.method.endswith(OWN))
    ]
    return Known(next(iter(dense), None), next(iter(layers), None))


def measure(wanted: list[Case], results: Path, loss_samples: int) -> None:
    """Run what ``results`` lacks."""
    demo_model()
    with tempfile.TemporaryDirectory() as folder:
        write_calibration(Path(folder))
        for case in wanted:
            entries = read(results)
            if case in entries:
                continue
            known = known_of(case, entries, loss_samples)
            by_rank = on_ranks(case.ranks, run, case, Path(folder), known, loss_samples)
            entry = asdict(case) | max(by_rank, key=lambda result: result["seconds"])
            append(results, case, entry)


def rows(entries: dict[Case, dict[str, Any]]) -> list[list[str]]:
    """Return a row for each kind and method: medians over seeds, and their ranges."""
    found = []
    there = {(case.what, case.method) for case in entries}
    for what, method in (pair for pair in kinds() if pair in there):
        by_ranks = [
            [of for case, of in entries.items() if (case.what, case.method, case.ranks) == (what, method, ranks)]
            for ranks in (1, 2)
        ]
        over = [spread([over_dense(of, kind) for of in entries], 3) for kind in KINDS for entries in by_ranks]
        seconds = [spread([of["seconds"] for of in entries], 0) for entries in by_ranks]
        seeds = {case.seed for case in entries if (case.what, case.method) == (what, method)}
        found.append([what, method, str(len(seeds)), *over, *seconds])
    return found


def kinds() -> list[tuple[str, str]]:
    """Return what is removed, and how, in the order of the table."""
    return [(what, method) for what, methods in METHODS_OF.items() for method in methods]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", default="", help="run methods with this in their names")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--loss-samples", type=int, default=4, help="windows by which layers are tried")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    wanted = [
        Case(what, method, seed, ranks)
        for seed in arguments.seeds
        for what, method in kinds()
        if arguments.only in f"{what}: {method}"
        for ranks in arguments.ranks
    ]
    measure(wanted, arguments.results, arguments.loss_samples)
    entries = read(arguments.results)
    tried_with = sorted({of["loss_samples"] for case, of in entries.items() if case.what == LAYERS})
    notes = (
        f"The model is the demo's, dequantized from 4 bits, in float32. Calibration: {NUM_SAMPLES} windows of "
        f"{LENGTH} tokens, drawn by the seed from every second State of the Union speech since 1990; layers are chosen "
        f"by the loss on {' or '.join(map(str, tried_with)) or 'some'} of them. With own words: the model writes "
        f"{OWN_WORDS} windows more, as in a job, which its seconds leave out; layers are then chosen on twice as many "
        f"of the mixture. {ABOUT} No training. Medians over the seeds, and the least and the greatest. Seconds: of the "
        "slower rank; every rank has one thread; of choosing units and refitting, without choosing layers."
    )
    text = heading("Removal from SmolLM2-135M", f"python -m benchmarks.bench_removal {arguments.results.name}")
    columns = ["removed", "by", "seeds", *(f"x dense, {kind}, {ranks}" for kind in KINDS for ranks in ("1 rank", "2"))]
    columns += ["s, 1 rank", "s, 2"]
    text += f"\n{textwrap.fill(notes, 118)}\n\n{table(columns, rows(entries))}\n"
    show(text, arguments.output)


if __name__ == "__main__":
    main()
