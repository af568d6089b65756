"""Pruning a checkpoint without its model, beside ``cp`` of the same files: bytes a second, and memory.

python -m benchmarks.bench_streamed [--layers 24] [--patterns 2:4 ...] [--repeats 3] [--folder DIR] [--compare]
    [--output benchmarks/results/FILE.md]
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from benchmarks.measure import anonymous_bytes, heading, on_ranks, peak_memory, show, table, unpin
from distprune.jobs import PruneJob, StreamedJob, run_prune_job, run_streamed_job

_HIDDEN, _INNER, _VOCABULARY, _NUM_FILES = 2048, 5632, 32000, 6
_TINY = 64, 128, 256
_CASES: dict[str, dict[str, Any]] = {
    "2:4": {"pattern": "2:4"},
    "row, 0.5": {"pattern": "row", "sparsity": 0.5},
    "global, 0.5": {"sparsity": 0.5},
}
_MEBI = 2**20


def make_checkpoint(folder: Path, num_layers: int, sizes: tuple[int, int, int] = (_HIDDEN, _INNER, _VOCABULARY)) -> int:
    """Write a bfloat16 Llama of random weights in several files, and return its bytes; ``sizes`` are as ``_TINY``."""
    hidden, inner, vocabulary = sizes
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    names, weight_map = [*shapes], {}
    step = math.ceil(len(names) / _NUM_FILES)
    for number in range(_NUM_FILES):
        file = f"model-{number + 1:05d}-of-{_NUM_FILES:05d}.safetensors"
        part = names[number * step : (number + 1) * step]
        tensors = {name: torch.randn(shapes[name], generator=generator).mul_(0.02).bfloat16() for name in part}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every weight file."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def streamed(
    rank: int, source: str, tiny: str, target: str, arguments: dict[str, Any]
) -> tuple[float, float, int, float, float]:
    """Return seconds of the job, of its choice, the peak of all anonymous memory of this rank's process, and the
    seconds of :func:`copied` right before.

    What comes before, and does not count, loads all code.
    """
    if dist.get_world_size() == 1:
        unpin()  # as the command line: a single rank has all cores
        torch.set_num_threads(os.cpu_count() or 1)
    run_streamed_job(StreamedJob(model=tiny, output=f"{target}-tiny", overwrite=True, **arguments))
    copies = copied(Path(source), Path(f"{target}-copy")) if rank == 0 else (0.0, 0.0)
    dist.barrier()
    held, started = anonymous_bytes(), time.perf_counter()
    with peak_memory(sample_seconds=0.05) as peak:
        report = run_streamed_job(StreamedJob(model=source, output=target, **arguments))
    return time.perf_counter() - started, report.seconds["choose"], held + peak.num_bytes, *copies


def loaded(_: int, source: str, target: str, arguments: dict[str, Any]) -> None:
    """Run the job that loads the model."""
    run_prune_job(PruneJob(model=source, output=target, **arguments))


def copied(source: Path, target: Path) -> tuple[float, float]:
    """Return the seconds of ``cp``, and of ``cp`` and ``sync``, the second time: it finds the memory of the first one.

    So does what comes next: memory that has long been free may be slow to come back to a virtual machine.
    """
    cores = os.sched_getaffinity(0)
    unpin()
    seconds = synced = 0.0
    for _ in range(2):
        subprocess.run(["sync"], check=True)
        started = time.perf_counter()
        subprocess.run(["cp", "-r", source, target], check=True)
        seconds = time.perf_counter() - started
        subprocess.run(["sync", *target.iterdir()], check=True)
        synced = time.perf_counter() - started
        shutil.rmtree(target)
    os.sched_setaffinity(0, cores)
    return seconds, synced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--patterns", nargs="+", choices=_CASES, default=[*_CASES])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Where some 9 GB are free.")
    parser.add_argument("--compare", action="store_true", help="Compare with the job that loads the model.")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        size = make_checkpoint(folder / "model", arguments.layers)
        make_checkpoint(folder / "tiny", 1, _TINY)
        for case in arguments.patterns:
            pruned = _CASES[case]
            expected = None
            if arguments.compare:
                on_ranks(1, loaded, str(folder / "model"), str(folder / "out"), pruned)
                expected = digests(folder / "out")
                shutil.rmtree(folder / "out")
            for num_ranks, sync_files in itertools.product((1, 2), (True, False)):
                asked, jobs = {**pruned, "sync_files": sync_files}, []
                for _ in range(arguments.repeats):
                    shutil.rmtree(folder / "out", ignore_errors=True)
                    results = on_ranks(
                        num_ranks, streamed, *(str(folder / of) for of in ("model", "tiny", "out")), asked
                    )
                    jobs.append(tuple(max(each) for each in zip(*results, strict=True)))
                copying = min(copies[sync_files] for _, _, _, *copies in jobs)
                seconds, choosing, *_ = min(jobs)
                memory = max(each[2] for each in jobs)
                same = "" if expected is None else "yes" if digests(folder / "out") == expected else "NO"
                shutil.rmtree(folder / "out")
                rows.append(
                    (
                        case,
                        num_ranks,
                        f"{seconds:.2f}",
                        f"{choosing:.2f}",
                        "cp and sync" if sync_files else "cp",
                        f"{copying:.2f}",
                        f"{size / seconds / 1e9:.2f}",
                        f"{copying / seconds:.0%}",
                        f"{memory / _MEBI:.0f}",
                        same,
                    )
                )
                print(rows[-1], flush=True)
    columns = ["pattern", "ranks", "s", "of it choosing s", "beside", "its s", "GB/s", "of its speed"]
    text = (
        heading(
            f"A checkpoint of {size / 1e9:.2f} GB without its model",
            f"python -m benchmarks.bench_streamed{' --compare' * arguments.compare}",
        )
        + f"\nA Llama of random bfloat16 weights in {_NUM_FILES} files, in the system's cache as far as it fits.\n"
        "Seconds are of a whole job in a process whose code is loaded; a single rank has both cores, as from the\n"
        "command line. Beside `cp` of the same files and a `sync` of the copy, the job also waits until all is on the\n"
        "disk; beside `cp` alone it does not (`--no-sync-files`). The copy ran right before each job, after\n"
        "another, which does not count.\n"
        f"Of {arguments.repeats} times the least. Memory is all of a rank's process\n"
        "but the files it maps, Python, torch and transformers included. Same bytes: sha256 of every file, as the job\n"
        "that loads the model writes them.\n\n" + table([*columns, "memory MiB", "same bytes"], rows)
    )
    show(text, arguments.output)


if __name__ == "__main__":
    main()
