"""The main job on SmolLM2-135M: seconds and peak anonymous memory of each stage, rank by rank.

python -m benchmarks.bench_job [--ranks 2] [--output benchmarks/results/FILE.md]
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.measure import anonymous_bytes, heading, on_ranks, peak_memory, show, table
from distprune import prune_model
from distprune.checkpoint.hf_directory import open_directory
from distprune.checkpoint.hf_load import load_model
from distprune.checkpoint.hf_save import save_model
from distprune.checkpoint.outputs import writing
from distprune.collectives.communicator import communicator
from launch.demo_inputs import demo_model

STAGES = ("load", "prune", "save")


def job(rank: int, source: str, target: str, dtype_name: str) -> dict[str, Any]:
    """Load, prune and save on this rank; bytes are beyond what the process held after its imports."""
    for module in ("transformers", "transformers.models.llama.modeling_llama", "safetensors.torch"):
        importlib.import_module(module)
    after_imports = anonymous_bytes()
    comm = communicator()
    dtype = getattr(torch, dtype_name)
    directory = open_directory(source)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    seconds: dict[str, float] = {}
    peaks: dict[str, int] = {}
    state: dict[str, Any] = {}

    def stage(name: str) -> None:
        if name == "load":
            state["model"] = load_model(directory, mesh=mesh, dtype=dtype, group=comm)
        elif name == "prune":
            state["report"] = prune_model(state["model"], 0.3, group=comm)
        else:
            with writing(target, inputs=[source], group=comm) as staging:
                save_model(state["model"], directory, staging, group=comm)

    for name in STAGES:
        held, started = anonymous_bytes() - after_imports, time.perf_counter()
        with peak_memory() as peak:
            stage(name)
        seconds[name] = time.perf_counter() - started
        peaks[name] = held + peak.num_bytes
    elements = sum(parameter.num_elements for parameter in state["report"].parameters)
    model_bytes = sum(p.numel() * p.element_size() for p in state["model"].parameters())
    return {"seconds": seconds, "peaks": peaks, "elements": elements, "model_bytes": model_bytes, "rank": rank}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    source = demo_model()
    rows = []
    mebi = 2**20
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            results = on_ranks(arguments.ranks, job, str(source), f"{folder}/out", dtype)
        for result in results:
            share = result["model_bytes"] / arguments.ranks
            allowed = share + result["elements"] / arguments.ranks + 200 * mebi
            rows.append(
                (
                    dtype,
                    result["rank"],
                    *(f"{result['seconds'][stage]:.2f}" for stage in STAGES),
                    *(f"{result['peaks'][stage] / mebi:.0f}" for stage in STAGES),
                    f"{share / mebi:.0f}",
                    f"{allowed / mebi:.0f}",
                )
            )
    columns = (
        "dtype",
        "rank",
        *(f"{stage} s" for stage in STAGES),
        *(f"{stage} peak MiB" for stage in STAGES),
        "model shard MiB",
        "shard + mask + 200 MiB",
    )
    text = (
        heading(f"Load, prune and save SmolLM2-135M on {arguments.ranks} ranks", "python -m benchmarks.bench_job")
        + "\nThe model is the demo's, dequantized from 4 bits. Peaks are anonymous resident memory, sampled\n"
        "every millisecond, beyond what the rank's process held after its imports.\n\n" + table(columns, rows)
    )
    show(text, arguments.output)


if __name__ == "__main__":
    main()
