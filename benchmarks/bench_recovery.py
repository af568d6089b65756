"""Fine-tuning SmolLM2-135M with the zeros of one-shot pruning held: perplexity before and after, on 2 ranks.

It runs what a user runs: ``distprune prune`` by SparseGPT, then ``launch/finetune_pruned.py``, on the text alone and
with the dense model as its teacher.

    python -m benchmarks.bench_recovery --output benchmarks/results/recovery_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from benchmarks.measure import heading, joined, speech_files, table
from distprune.checkpoint import BUNDLED

NUM_RANKS, NUM_SAMPLES, LENGTH = 2, 16, 256  # of calibration
PATTERNS = {"50 %": ("unstructured", "--sparsity", "0.5"), "2:4": ("2:4",)}
TRAINERS = {"text alone": (), "distilled from the dense model": ("--teacher", BUNDLED)}
_RESULT = re.compile(r"perplexity ([\d.]+) -> ([\d.]+) in (\d+) s; zeros ([\d.]+%) -> ([\d.]+%)")


def launch(*arguments: str) -> str:
    """Run a script or module on ranks of one thread, and return what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    print(ended.stdout, flush=True)
    return ended.stdout


def finetune(model: str, folder: Path, *options: str) -> tuple[str, ...]:
    """Return perplexity before, after, seconds, and the shares of zeros."""
    data = ("--data", f"{folder}/train.txt", "--eval", f"{folder}/evaluation.txt")
    found = _RESULT.search(launch("launch/finetune_pruned.py", model, *data, *options))
    assert found is not None
    return found.groups()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--patterns", nargs="*", default=["50 %"], choices=PATTERNS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        recent = speech_files(since=1990)
        for name, paths in (("train.txt", recent[::2]), ("evaluation.txt", recent[1::2])):
            (folder / name).write_bytes(joined(paths))
        for pattern in arguments.patterns:
            pruned = str(folder / pattern.replace(" %", "").replace(":", "_"))
            launch(
                *("-m", "distprune", "prune", BUNDLED, "--method", "sparsegpt", "--pattern", *PATTERNS[pattern]),
                *("--calibration", f"{folder}/train.txt", "--samples", str(NUM_SAMPLES)),
                *("--sequence-length", str(LENGTH), "--output", pruned),
            )
            for trainer, options in TRAINERS.items():
                before, after, seconds, *zeros = finetune(pruned, folder, "--steps", str(arguments.steps), *options)
                rows.append((pattern, trainer, before, after, seconds, " -> ".join(zeros)))
        dense = finetune(BUNDLED, folder, "--steps", "0")[0]
    notes = (
        f"SparseGPT with {NUM_SAMPLES} windows of {LENGTH} tokens, then {arguments.steps} steps of 4 windows of "
        f"{LENGTH} tokens a rank with zeros held (launch/finetune_pruned.py with its defaults), on {NUM_RANKS} ranks "
        "of one thread. The text is every second State of the Union speech since 1990; perplexity is of 8,192 tokens "
        f"of the others, in windows of {LENGTH}. The dense model has {dense}. Seconds are of the steps alone."
    )
    text = heading("Recovery by training with zeros held", "python -m benchmarks.bench_recovery")
    text += "\n" + textwrap.fill(notes, 118) + "\n\n"
    text += table(("pattern", "trained on", "before", "after", "seconds", "zeros"), rows)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
