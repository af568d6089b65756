"""Whether there are kernels for a device."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

_DEVICES = ("cuda",)  # of NVIDIA, and AMD's, which torch calls so


def has_kernels(*devices: torch.device) -> bool:
    """Return whether all ``devices`` are one GPU, and Triton is installed, which torch for GPUs brings."""
    distinct = {*devices}
    return len(distinct) == 1 and distinct.pop().type in _DEVICES and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def kernels(name: str) -> Any:
    """Return the module ``name`` of kernels."""
    return importlib.import_module(f"distprune.kernels.on_device.{name}")


def launch(kernel: Any, grid: tuple[int], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Launch ``kernel`` on ``device``; Triton takes the current one."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **constants)


@cache
def num_programs(device: torch.device) -> int:
    """Return how many programs share the work: several times as many as run at once, so that all end together."""
    is_real = device.type != "cpu"  # else Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count * 32 if is_real else 3
