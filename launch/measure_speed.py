"""How fast and how large models are in plain transformers, beside the first of them.

    python launch/measure_speed.py llama smaller

Each model is measured in a process of its own, with all cores it may use, or on a GPU with ``--device cuda``: one
forward of up to 512 random tokens, greedy generation after a short prompt, the memory of the weights, and the files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

LENGTH, PROMPT, GENERATED = 512, 32, 64  # tokens of a forward, a prompt, and what is generated
# A figure is the median of so many runs at least, for so long; or of those there is time for.
TIMES, LEAST_SECONDS, MOST_SECONDS = 5, 1.0, 20.0


def measure(path: Path, device: torch.device) -> dict[str, Any]:
    """Return the figures of the model in the directory ``path``."""
    from transformers import AutoModelForCausalLM

    resident = resident_bytes(device)
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype="auto").to(device).eval()
    config = model.config.get_text_config()
    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    drawn = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    prompt = drawn[:, : min(PROMPT, length // 2)]
    num_new = min(GENERATED, length - prompt.shape[1])
    exactly = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(prompt)
    with torch.no_grad():
        forward = timed(lambda: model(drawn, use_cache=False), length, device)
        generation = timed(lambda: model.generate(prompt, attention_mask=mask, **exactly), num_new, device)
    return {
        "forward": forward,
        "generation": generation,
        "memory": resident_bytes(device) - resident,
        "parameters": model.num_parameters(),
        "file_bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
    }


def timed(call: Callable[[], object], num_tokens: int, device: torch.device) -> dict[str, float]:
    """Return the rate, the median of several calls that have been warmed up, and the FLOPs of one."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # whose products are counted
        call()
    seconds: list[float] = []
    began = time.perf_counter()
    while not seconds or (
        (spent := time.perf_counter() - began) < MOST_SECONDS and (len(seconds) < TIMES or spent < LEAST_SECONDS)
    ):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return {"tokens_per_second": num_tokens / statistics.median(seconds), "flops": counter.get_total_flops()}


def resident_bytes(device: torch.device) -> int:
    """Return what the process holds in the memory of ``device``."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if len(arguments.models) == 1:
        print(json.dumps(measure(arguments.models[0], torch.device(arguments.device))))
        return
    found = []
    for path in arguments.models:
        command = [sys.executable, __file__, str(path), "--device", arguments.device]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found.append(json.loads(said.strip().rpartition("\n")[2]))
    for path, figures in zip(arguments.models, found, strict=True):
        print(f"{path}: {figures['parameters']:,} parameters")
        for kind in ("forward", "generation"):
            rate, first = figures[kind]["tokens_per_second"], found[0][kind]
            faster = f"{rate / first['tokens_per_second']:.2f} times as fast as the first"
            print(f"  {kind}: {rate:,.0f} tokens/s, {faster}; FLOPs: {first['flops'] / figures[kind]['flops']:.2f}")
        print(f"  memory {figures['memory'] / 2**20:,.0f} MiB, files {figures['file_bytes'] / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
