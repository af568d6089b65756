"""One-shot pruning of SmolLM2-135M by the job, as a user runs it: quality on three kinds of text, and seconds.

Runs what RESULTS.jsonl lacks, appends every run to it as one line, and shows the table of all that is in it: a run
that was interrupted goes on by the same command, and what is not to be timed may run side by side on one file.

    python -m benchmarks.bench_one_shot RESULTS.jsonl --output benchmarks/results/one_shot_HARDWARE_DATE.md
    python -m benchmarks.bench_one_shot RESULTS.jsonl --ranks 1 --samples 64 --methods ADMM
    python -m benchmarks.bench_one_shot RESULTS.jsonl --ranks 1 --samples 16 --device cuda
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.measure import heading, on_ranks, show, spread, table, unpin
from benchmarks.texts import ABOUT, KINDS, LENGTH, over_dense, perplexities_of, write_calibration
from distprune.cli.commands import JobCommand
from distprune.cli.main import app
from distprune.jobs import OneShotJob, run_one_shot_job
from launch.demo_inputs import demo_model

REFERENCE = "SparseGPT"  # beside whose seconds the others' are set

# A row of the table is a method and a pattern: its name, and what it is on the command line.
METHODS = {
    "Wanda": "--method wanda --own-words 0",
    "Wanda, permuted": "--method wanda --own-words 0 --permute channels",
    REFERENCE: "--method sparsegpt --own-words 0",
    "ADMM": "--method admm --own-words 0 --refit none --permute none",
    "ADMM, uniform": "--method admm --own-words 0 --refit none --permute none --allocation uniform",
    "ADMM, blocks fitted": "--method admm --own-words 0 --permute none",
    "ADMM, own words": "--method admm --refit none --permute none",
    "default, not permuted": "--method admm --permute none",
    "default, uniform": "--method admm --allocation uniform",
    "default": "--method admm",
    "default, 8 passes": "--method admm --epochs 8",
    "default, no text, not permuted": "--method admm --calibration self --permute none",
    "default, no text, uniform": "--method admm --calibration self --allocation uniform",
    "default, no text": "--method admm --calibration self",
}
PATTERNS = {
    "50 %": "--pattern unstructured --sparsity 0.5",
    "60 %": "--pattern unstructured --sparsity 0.6",
    "2:4": "--pattern 2:4",
}


@dataclass(frozen=True)
class Case:
    """One run: what it is called, what is asked for, and on how many ranks."""

    method: str
    pattern: str
    samples: int
    seed: int
    ranks: int
    options: str


def options(method: str, pattern: str) -> str:
    return f"{METHODS[method]} {PATTERNS[pattern]}"


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield what is asked for; the runs that are compared with each other follow each other."""
    for samples in arguments.samples:
        for pattern in arguments.patterns:
            for seed in arguments.seeds:
                for method in arguments.methods:
                    says_nothing = "uniform" if pattern == "2:4" else "permuted"  # no shares; no groups
                    if says_nothing not in method:
                        for ranks in arguments.ranks:
                            yield Case(method, pattern, samples, seed, ranks, options(method, pattern))


def asked(case: Case, calibration: Path, output: str) -> OneShotJob:
    """Return the job of the command line of ``case``."""
    words = ["prune", str(demo_model()), "--dtype", "float32", "--calibration", str(calibration)]
    words += f"{case.options} --samples {case.samples} --seed {case.seed} --sequence-length {LENGTH}".split()
    words += ["--output", output]
    requests: list[JobCommand] = []
    app(words, obj=requests.append, standalone_mode=False)
    job = requests[0].job
    assert isinstance(job, OneShotJob)
    return job


def run(_: int, job: OneShotJob, device: str) -> dict[str, float]:
    """Run the job on this rank's ``device``; return seconds of pruning and of writing."""
    if dist.get_world_size() == 1:
        unpin()
    report = run_one_shot_job(job, device=device)
    writing, allocating = (report.seconds.get(stage, 0.0) for stage in ("write words", "allocate"))
    return {"seconds": report.seconds["prune"] + allocating, "writing": writing}


def read(results: Path) -> dict[Case, dict[str, Any]]:
    """Return what has been run, by case."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return {Case(**entry["case"]): entry for entry in map(json.loads, lines)}


def measure(wanted: list[Case], results: Path, device: str) -> None:
    """Run what ``results`` lacks."""
    with tempfile.TemporaryDirectory() as folder:
        calibration, dense = write_calibration(Path(folder)), perplexities_of(demo_model(), device)
        for case in wanted:
            if case in read(results):
                continue
            with tempfile.TemporaryDirectory() as output:
                by_rank = on_ranks(case.ranks, run, asked(case, calibration, f"{output}/pruned"), device)
                after = perplexities_of(f"{output}/pruned", device)
                entry = {"case": asdict(case), "dense": dense, "perplexity": after}
            append(results, case, entry | max(by_rank, key=lambda result: result["seconds"]))


def append(results: Path, case: object, entry: dict[str, Any]) -> None:
    """Show what a run gave, and add it to ``results``."""
    over = ", ".join(f"{kind} {over_dense(entry, kind):.3f}" for kind in KINDS)
    print(case, f"x dense: {over}; {entry['seconds']:.1f} s", flush=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")  # at once, when the file is closed


def rows(entries: dict[Case, dict[str, Any]]) -> list[tuple[object, ...]]:
    """Return a row for each method, pattern and number of windows: medians over seeds, and their ranges."""
    there = {(case.method, case.pattern, case.samples) for case in entries}
    in_order = itertools.product(sorted({samples for *_, samples in there}), PATTERNS, METHODS)
    kinds = [(method, pattern, samples) for samples, pattern, method in in_order if (method, pattern, samples) in there]

    def of(kind: tuple[str, str, int], ranks: int) -> dict[int, dict[str, Any]]:
        return {c.seed: e for c, e in entries.items() if (c.method, c.pattern, c.samples, c.ranks) == (*kind, ranks)}

    def faster(many: dict[int, dict[str, Any]], few: dict[int, dict[str, Any]]) -> str:
        return spread([few[seed]["seconds"] / many[seed]["seconds"] for seed in few.keys() & many.keys()], 2)

    return [
        (
            *kind,
            len({case.seed for case in entries if (case.method, case.pattern, case.samples) == kind}),
            *(
                spread([over_dense(entry, text) for entry in of(kind, ranks).values()], 3)
                for text in KINDS
                for ranks in (1, 2)
            ),
            *(
                spread([entry[what] for entry in of(kind, ranks).values()], 1)
                for what in ("seconds", "writing")
                for ranks in (1, 2)
            ),
            faster(of(kind, 2), of(kind, 1)),
            faster(of((REFERENCE, *kind[1:]), 1), of(kind, 1)),
        )
        for kind in kinds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    measure(list(cases(arguments)), arguments.results, arguments.device)
    known = set(itertools.product(METHODS, PATTERNS))
    entries = {
        case: entry
        for case, entry in read(arguments.results).items()
        if (case.method, case.pattern) in known and case.options == options(case.method, case.pattern)
    }
    found = {kind: sorted({f"{entry['dense'][kind]:.2f}" for entry in entries.values()}) for kind in KINDS}
    dense = ", ".join(f"{' or '.join(found[kind])} on {kind}" for kind in KINDS)
    notes = (
        f"The model is the demo's, dequantized from 4 bits, in float32. Calibration: windows of {LENGTH} tokens, "
        "drawn by the seed from every second State of the Union speech since 1990; by default, the model writes 96 "
        f"more; without a text, all. {ABOUT} Dense: {dense}. Seconds of pruning: of the slower rank, from the "
        "loaded model and the windows to the last block on the disk; every rank has one thread, on "
        f"{arguments.device}. Medians over the seeds, and the least and the greatest; factors are by seed."
    )
    columns = [
        "method",
        "pattern",
        "windows",
        "seeds",
        *(f"x dense, {kind}, {ranks}" for kind in KINDS for ranks in ("1 rank", "2")),
    ]
    columns += ["s, 1 rank", "s, 2", "s of writing, 1", "2", "2 ranks faster", f"x {REFERENCE}'s seconds, 1 rank"]
    text = heading("One-shot pruning of SmolLM2-135M", f"python -m benchmarks.bench_one_shot {arguments.results.name}")
    text += f"\n{textwrap.fill(notes, 118)}\n\n{table(columns, rows(entries))}\n"
    text += "".join(f"- {name}: `{options}`\n" for name, options in (METHODS | PATTERNS).items())
    show(text, arguments.output)


if __name__ == "__main__":
    main()
