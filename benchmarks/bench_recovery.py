"""Fine-tuning SmolLM2-135M with the zeros of one-shot pruning held: perplexity before and after, on 2 ranks.

It runs what a user runs: ``distprune prune``, then ``distprune finetune``, on the text alone, with the dense model as
its teacher, and on what that teacher writes; and evaluates on three kinds of text.

    python -m benchmarks.bench_recovery --minutes 10 --output benchmarks/results/recovery_HARDWARE_DATE.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from benchmarks.measure import heading, show, table
from benchmarks.texts import ABOUT, KINDS, LENGTH, perplexities_of, write_calibration
from launch.demo_inputs import demo_model

NUM_RANKS, NUM_SAMPLES, NUM_OWN = 2, 16, 128  # windows of calibration, and that the teacher writes
PATTERNS = {"50 %": ("unstructured", "--sparsity", "0.5"), "2:4": ("2:4",)}
TRAINERS = {  # whether there is a text, and a teacher
    "text alone": (True, False),
    "text, distilled from the dense model": (True, True),
    "the dense model's own words, distilled from it": (False, True),
}


def launch(*arguments: str) -> dict[str, Any]:
    """Run a job on ranks of one thread, and return its report; its last argument is the output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "-m", "distprune", *arguments], env=environment, check=True)
    report: dict[str, Any] = json.loads((Path(arguments[-1]) / "report.json").read_text())
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--method", default="admm")
    parser.add_argument("--patterns", nargs="*", default=["2:4"], choices=PATTERNS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        calibration, dense = str(write_calibration(folder)), perplexities_of(demo_model())
        for pattern in arguments.patterns:
            pruned = str(folder / pattern.replace(" %", "").replace(":", "_"))
            launch(
                *("prune", str(demo_model()), "--method", arguments.method, "--pattern", *PATTERNS[pattern]),
                *("--calibration", calibration, "--samples", str(NUM_SAMPLES)),
                *("--sequence-length", str(LENGTH), "--output", pruned),
            )
            before = perplexities_of(pruned)
            for number, (trainer, (has_text, is_taught)) in enumerate(TRAINERS.items()):
                data = ("--data", calibration) if has_text else ("--own-words", str(NUM_OWN))
                teacher = ("--teacher", str(demo_model())) if is_taught else ()
                report = launch(
                    *("finetune", pruned, *data, "--minutes", str(arguments.minutes)),
                    *(*teacher, "--output", f"{pruned}-{number}"),
                )
                training = report["training"]
                after = perplexities_of(f"{pruned}-{number}")
                figures = [f"{of[kind]:.2f}" for kind in KINDS for of in (dense, before, after)]
                share = f"{training['num_zeros'] / training['num_elements']:.2%}"
                rows.append((pattern, trainer, *figures, str(training["num_steps"]), share))
                print(*rows[-1], sep=" | ", flush=True)
    notes = (
        f"distprune prune --method {arguments.method} with {NUM_SAMPLES} windows of {LENGTH} tokens and its defaults, "
        f"then {arguments.minutes:g} minutes of distprune finetune with its defaults, on {NUM_RANKS} ranks of one "
        "thread. The text is every second State of the Union speech since 1990; own words are "
        f"{NUM_OWN} windows, written before the minutes begin. {ABOUT} Zeros are those of all parameters."
    )
    patterns = " ".join(f'"{pattern}"' for pattern in arguments.patterns)
    asked = f"--method {arguments.method} --patterns {patterns} --minutes {arguments.minutes:g}"
    text = heading("Recovery by training with zeros held", f"python -m benchmarks.bench_recovery {asked}")
    text += "\n" + textwrap.fill(notes, 118) + "\n\n"
    figures = [f"{kind}, {when}" for kind in KINDS for when in ("dense", "before", "after")]
    text += table(("pattern", "trained on", *figures, "steps", "zeros"), rows)
    show(text, arguments.output)


if __name__ == "__main__":
    main()
