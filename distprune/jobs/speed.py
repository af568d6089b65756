"""How fast and how large models are in plain transformers: each is measured, whole, in a process of its own.

The process is the first rank's child, with all cores that the rank may use, while the ranks wait for it. Random tokens
are run: one forward of up to 512 of them, and greedy generation after a short prompt.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from distprune.checkpoint.optional_packages import import_extra
from distprune.collectives.slow import work_together
from distprune.jobs.run import Run, clock
from distprune.models.decoder_blocks import text_config

_LENGTH = 512  # tokens of a forward
_PROMPT, _GENERATED = 32, 64  # tokens
# A figure is the median of so many runs at least, for so long; or of those there is time for.
_TIMES, _LEAST_SECONDS, _MOST_SECONDS = 5, 1.0, 20.0
_MAX_MESSAGE = 500  # characters
# Of torchrun and MPI: the child is no rank, and has all cores.
_NOT_PASSED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def compare_speed(run: Run, before: Path, after: Path) -> dict[str, Any] | None:
    """Return the figures of the model directories ``before`` and ``after`` and their ratios; ``None``: it failed.

    Memory that this process keeps for nothing is freed for those that measure. Every rank must call it. If a model
    cannot be measured, because the memory does not hold it, say, it says so and returns None.
    """
    gc.collect()  # modules refer to each other
    if run.device.type != "cpu":
        torch.get_device_module(run.device.type).empty_cache()
    run.reporter.begin("measuring speed")
    with clock(run.seconds, "speed"):
        try:
            return compared(measure_apart(run, before), measure_apart(run, after))
        except (ValueError, OSError) as error:  # on every rank
            run.reporter.say(f"speed is left out, measuring it failed: {error}")
            return None


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return both figures, how many times as fast the second model is, and what its FLOPs promise. Local."""
    ratios = {
        kind: {
            "speedup": after[kind]["tokens_per_second"] / before[kind]["tokens_per_second"],
            "promised": before[kind]["flops"] / after[kind]["flops"],
        }
        for kind in ("forward", "generation")
    }
    return {"before": dict(before), "after": dict(after), **ratios}


def measure_apart(run: Run, path: Path) -> dict[str, Any]:
    """Return what a process of its own, the first rank's, measures of the model directory ``path``.

    Every rank must call it: rounds as :func:`work_together`, and three for the figures.

    Raises:
        ValueError, OSError: on every rank: it measured nothing, or could not be started; what it said last.
    """
    measured: dict[str, Any] = {}
    child: list[subprocess.Popen[str]] = []

    def measure() -> None:
        if run.comm.rank > 0:
            return
        child.append(
            subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import _main; _main()", str(path), run.device.type],
                env={name: value for name, value in os.environ.items() if name not in _NOT_PASSED},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        said, complained = child[0].communicate()
        if child[0].returncode != 0:
            last = (complained.splitlines() or [f"it ended with {child[0].returncode}"])[-1]
            raise ValueError(last[:_MAX_MESSAGE])
        measured.update(json.loads(said.strip().rpartition("\n")[2]))  # its last line

    try:
        work_together(run.comm, measure)
    finally:
        for process in child:
            process.kill()
            process.wait()
    return dict(run.comm.broadcast(measured))


def _main() -> None:
    """Print the figures of the model directory that the command line names, as JSON."""
    path, device = sys.argv[1:]
    if (own := Path("/proc/self/oom_score_adj")).exists():
        own.write_text("1000")  # if memory runs out, it is this process that goes
    sys.stdout.write(json.dumps(_measure(Path(path), torch.device(device))) + "\n")


def _measure(path: Path, device: torch.device) -> dict[str, Any]:
    transformers = import_extra("transformers", "hf")
    loading = {"local_files_only": True, "trust_remote_code": False, "dtype": "auto"}
    resident = _resident_bytes(device)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **loading).to(device).eval()
    config = text_config(model)
    positions = getattr(config, "max_position_embeddings", None) or _LENGTH
    length = min(_LENGTH, positions)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(config.vocab_size, (1, length), generator=generator, device="cpu").to(device)
    prompt = drawn[:, : min(_PROMPT, length // 2)]
    num_new = min(_GENERATED, length - prompt.shape[1])

    def forward() -> object:
        return model(drawn, use_cache=False)

    def generate() -> object:
        mask = torch.ones_like(prompt)
        exactly = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False, "num_beams": 1}
        return model.generate(prompt, attention_mask=mask, pad_token_id=0, **exactly)

    with torch.no_grad():
        measured = {"forward": _timed(forward, length, device), "generation": _timed(generate, num_new, device)}
        memory = _resident_bytes(device) - resident
    return {
        **measured,
        "memory": memory,
        "parameters": model.num_parameters(),
        "file_bytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
    }


def _timed(call: Callable[[], object], num_tokens: int, device: torch.device) -> dict[str, Any]:
    """Return the median of several calls that have been warmed up, and the FLOPs of one."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # whose products are counted
        call()
    seconds: list[float] = []
    began = time.perf_counter()
    call()
    while not seconds or (
        (spent := time.perf_counter() - began) < _MOST_SECONDS and (len(seconds) < _TIMES or spent < _LEAST_SECONDS)
    ):
        _synchronize(device)
        started = time.perf_counter()
        call()
        _synchronize(device)
        seconds.append(time.perf_counter() - started)
    return {
        "tokens_per_second": num_tokens / statistics.median(seconds),
        "num_tokens": num_tokens,
        "flops": counter.get_total_flops(),
        "num_runs": len(seconds),
    }


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize(device)


def _resident_bytes(device: torch.device) -> int:
    """Return what the process holds in the memory of ``device``."""
    if device.type != "cpu":
        return int(torch.get_device_module(device.type).memory_allocated(device))
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")
