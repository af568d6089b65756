"""One-shot pruning of SmolLM2-135M: perplexity and seconds, on 1 and 2 ranks, beside a plain single-process run.

The plain run is ``tests/oneshot_oracle.py``, written from the papers. Ranks have one thread each; runs
that are timed follow each other, so that none waits for another.

    python -m benchmarks.bench_one_shot speed --output benchmarks/results/one_shot_speed_HARDWARE_DATE.md
    python -m benchmarks.bench_one_shot quality --output benchmarks/results/one_shot_quality_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measure import heading, on_ranks, speech_files, table
from distprune import NByM, Unstructured
from distprune.calibration import load_samples
from distprune.checkpoint import BUNDLED, load_model, open_directory, resolve_model
from distprune.evaluation import perplexity, tokenize_file
from distprune.oneshot import OneShotMethod, prune_blocks
from distprune.patterns import Pattern
from tests import oneshot_oracle

NUM_SAMPLES, LENGTH = 16, 256
NUM_TURNS = {NUM_SAMPLES: 5, 128: 3}  # by samples; 128 are what the papers and the command line take
ORACLE, APART = "oracle, float32", "2 times 1 rank, at once"
EVALUATION_TOKENS, EVALUATION_LENGTH = 4096, 512
EXCERPT, LONG_EXCERPT = 4000, 12000  # characters of each speech
STAGES = ("forward", "reduce", "factor", "sweep")
PATTERNS: dict[str, tuple[Pattern, oneshot_oracle.Pattern]] = {
    "50 %": (Unstructured(0.5), 0.5),
    "2:4": (NByM(2, 4), oneshot_oracle.NM(2, 4)),
    "4:8": (NByM(4, 8), oneshot_oracle.NM(4, 8)),
}


def write_texts(folder: Path) -> None:
    """Write what to calibrate and to evaluate on: excerpts of every second speech since 1990, and of the others."""
    recent = [path.read_text(encoding="utf-8") for path in speech_files(since=1990)]
    for name, chosen, length in (
        ("calibration.txt", recent[::2], EXCERPT),
        ("long.txt", recent[::2], LONG_EXCERPT),
        ("evaluation.txt", recent[1::2], EXCERPT),
    ):
        excerpts = (text[len(text) // 2 :][:length] for text in chosen)
        (folder / name).write_text("\n\n".join(excerpts), encoding="utf-8")


def run(
    rank: int, source: str, folder: str, who: str, method: str, pattern: str, num_samples: int = NUM_SAMPLES
) -> dict[str, Any]:
    """Load, prune by ``who`` (``"dense"``: not at all; ``APART``: each rank all for itself) and evaluate."""
    from transformers import AutoTokenizer

    directory, world = open_directory(source), dist.get_world_size()
    groups = [dist.new_group([member]) for member in range(world)] if who == APART else []
    mesh = init_device_mesh("cpu", (world,)) if world > 1 and who != APART else None
    model = load_model(directory, mesh=mesh, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    samples = load_samples(
        tokenizer,
        Path(folder, "calibration.txt" if num_samples == NUM_SAMPLES else "long.txt"),
        model,
        num_samples=num_samples,
        sequence_length=LENGTH,
    )
    result: dict[str, Any] = {"stages": {}, "zeros": None}
    dist.barrier()
    started = time.perf_counter()
    if who.startswith("oracle"):
        dtype = torch.float32 if who.endswith("float32") else torch.float64
        oneshot_oracle.prune_model(model, samples, cast(Any, method), PATTERNS[pattern][1], dtype=dtype)
    elif who != "dense":
        report = prune_blocks(
            model,
            samples,
            method=cast(OneShotMethod, method),
            pattern=PATTERNS[pattern][0],
            group=groups[rank] if groups else None,
            seed=0,
        )
        result["stages"] = sum((Counter(block.seconds) for block in report.blocks), Counter())
        maps = [of_map for block in report.blocks for of_map in block.maps]
        result["zeros"] = sum(m.num_pruned for m in maps), sum(m.num_elements for m in maps)
    result["seconds"] = time.perf_counter() - started
    tokens = tokenize_file(
        tokenizer, Path(folder, "evaluation.txt"), max_tokens=EVALUATION_TOKENS, sequence_length=EVALUATION_LENGTH
    )
    result["perplexity"] = perplexity(model, tokens, sequence_length=EVALUATION_LENGTH)
    return result


def run_anywhere(*what: Any) -> dict[str, Any]:
    """:func:`run` on whichever core is free: what is not timed goes side by side."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return run(*what)


def measure_speed(one: Callable[..., dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return a row for each method, number of samples and who, of the run of median time."""
    rows: list[tuple[object, ...]] = []
    for num_samples, num_turns in NUM_TURNS.items():
        for method in ("sparsegpt", "wanda"):
            whos = {"1 rank": (1, "distprune"), "2 ranks": (2, "distprune")}
            if num_samples == NUM_SAMPLES:
                whos = {ORACLE: (1, ORACLE), **whos, APART: (2, APART)}
            turns = [
                {name: one(*who, method, "50 %", num_samples) for name, who in whos.items()} for _ in range(num_turns)
            ]
            rows += _speed(method, num_samples, turns)
    return rows


def _speed(method: str, num_samples: int, turns: list[dict[str, dict[str, Any]]]) -> list[tuple[object, ...]]:
    """Return a row for each who; how many times as fast as the oracle, and as one rank."""
    of_all = {who: sorted((turn[who] for turn in turns), key=lambda of: of["seconds"]) for who in turns[0]}
    middle = {who: runs[len(runs) // 2] for who, runs in of_all.items()}

    def times(other: str, who: str) -> str:
        # Of runs that followed each other: the machine's own speed drifts. Ranks that work apart do all work twice.
        factors = sorted(turn[other]["seconds"] / turn[who]["seconds"] * (1 + (who == APART)) for turn in turns)
        return f"{statistics.median(factors):.2f} ({factors[0]:.2f} to {factors[-1]:.2f})"

    return [
        (
            method,
            num_samples,
            who,
            f"{of['seconds']:.1f}",
            " to ".join(f"{of_all[who][i]['seconds']:.1f}" for i in (0, -1)) if len(turns) > 1 else "",
            times(ORACLE, who) if ORACLE in turns[0] and who != ORACLE else "",
            times("1 rank", who) if who not in (ORACLE, "1 rank") else "",
            *(f"{of['stages'][stage]:.1f}" if of["stages"] else "" for stage in STAGES),
        )
        for who, of in middle.items()
    ]


def measure_quality(one: Callable[..., dict[str, Any]], num_workers: int) -> list[tuple[object, ...]]:
    """Return a row for each method and pattern; nothing is timed, so runs of one rank go side by side."""
    cases = [(method, pattern) for pattern in PATTERNS for method in ("sparsegpt", "wanda")]
    cases.append(("magnitude", "50 %"))
    with ThreadPoolExecutor(num_workers) as pool:
        dense = pool.submit(one, 1, "dense", "", "")
        oracles = {case: pool.submit(one, 1, "oracle", *case) for case in cases if case[0] != "magnitude"}
        alone = {case: pool.submit(one, 1, "distprune", *case) for case in cases}
    pairs = {case: one(2, "distprune", *case) for case in cases}
    rows: list[tuple[object, ...]] = [("dense", "", f"{dense.result()['perplexity']:.2f}", "", "", "", "")]
    for case in cases:
        base = (oracles[case] if case in oracles else alone[case]).result()["perplexity"]
        pruned, numel = alone[case].result()["zeros"]
        rows.append(
            (
                *case,
                f"{base:.2f}" if case in oracles else "",
                *(
                    f"{of['perplexity']:.2f} ({100 * (of['perplexity'] / base - 1):+.2f} %)"
                    for of in (alone[case].result(), pairs[case])
                ),
                f"{pruned:,} of {numel:,}",
                "same" if pairs[case]["zeros"] == (pruned, numel) else "DIFFERENT",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("speed", "quality"))
    parser.add_argument("--workers", type=int, default=2, help="runs side by side where nothing is timed")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    source = str(resolve_model(BUNDLED))
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))

        def one(ranks: int, *what: str | int) -> dict[str, Any]:
            job = run if arguments.what == "speed" else run_anywhere
            results = on_ranks(ranks, job, source, folder, *what)
            print(what, ranks, f"{results[0]['perplexity']:.2f}", f"{results[0]['seconds']:.1f} s", flush=True)
            return max(results, key=lambda result: result["seconds"])

        rows = measure_speed(one) if arguments.what == "speed" else measure_quality(one, arguments.workers)
    text = heading(
        f"One-shot pruning of SmolLM2-135M: {arguments.what}", f"python -m benchmarks.bench_one_shot {arguments.what}"
    )
    text += (
        "\nThe model is the bundled one, dequantized from 4 bits, in float32; all Linears of its 30 blocks are\n"
        f"pruned. Calibration: sequences of {LENGTH} tokens of State of the Union speeches since 1990, every second\n"
        "one. The oracle is tests/oneshot_oracle.py, one process.\n\n"
    )
    if arguments.what == "speed":
        num_turns = " and ".join(f"{turns} with {num}" for num, turns in NUM_TURNS.items())
        notes = (
            f"From the loaded model to the pruned one, at 50 %; every rank has one thread. Runs take turns, {num_turns}"
            " sequences; seconds, of the slower rank, and stages are those of the run of median time; factors are "
            "medians over the turns, and the least and the greatest. Two ranks that do the whole work each, side by "
            "side with nothing in common, show what this machine's two cores do to each other: their factor, for twice "
            "the work, is about the most that two ranks can reach."
        )
        text += textwrap.fill(notes, 118) + "\n\n"
        columns: tuple[str, ...] = ("method", "sequences", "who", "seconds", "range", "x oracle", "x 1 rank")
        columns += tuple(f"{stage} s" for stage in STAGES)
    else:
        text += (
            f"Perplexity, of {EVALUATION_TOKENS:,} tokens of the other speeches in windows of {EVALUATION_LENGTH}, "
            f"with {NUM_SAMPLES} sequences of\ncalibration. In parentheses: against the oracle, whose SparseGPT "
            "computes in float64 (magnitude: against 1 rank).\n\n"
        )
        columns = ("method", "pattern", "oracle", "1 rank", "2 ranks", "pruned", "count on 2 ranks")
    text += table(columns, rows)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
