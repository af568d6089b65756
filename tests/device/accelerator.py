"""The device ``simulated`` in this process: torch has it from :func:`register` on, for good.

It changes what torch does elsewhere, too (the current accelerator, FSDP's default device, autocast): processes that
have it are a pool of their own, and the one that runs the tests never does.

What it simulates, and what not, is in ``memory.h`` (memory that the host cannot touch, poisoned where it is fresh),
``kernels.h`` (mixed devices are refused), ``late.h`` (copies that the host does not wait for) and ``group.h`` (ranks).
Kernels run at once and on the CPU: a host that does not wait for one sees it only through the copies, and streams that
do not wait for each other are not told apart.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration

from tests.device.build import load

__all__ = ["BACKEND", "DEVICE", "extension", "on_rank", "register"]

DEVICE, BACKEND = "simulated", "nccllike"
_CAPACITY = 16 << 30


@functools.cache
def extension() -> Any:
    """Return the compiled part, which is loaded by the first call."""
    return load()


def register() -> None:
    """Give torch the device and the backend of its ranks."""
    backend_registration.rename_privateuse1_backend(DEVICE)
    compiled = extension()
    module: Any = types.ModuleType(f"torch.{DEVICE}")
    for name, value in (_devices(compiled) | _streams() | _random(compiled) | _memory(compiled)).items():
        setattr(module, name, value)
    torch._register_device_module(DEVICE, module)  # type: ignore[no-untyped-call]
    quantized = [torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]
    backend_registration.generate_methods_for_privateuse1_backend(unsupported_dtype=quantized)
    dist.Backend.register_backend(BACKEND, _make_group, devices=[DEVICE])


def on_rank(rank: int) -> torch.device:
    """Make the rank's device the current one, and return it."""
    device = torch.device(DEVICE, rank)
    torch.accelerator.set_device_index(device)
    return device


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return extension().nccl_like(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


@contextlib.contextmanager
def _as_current(device: Any) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(_index(device))
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _devices(compiled: Any) -> dict[str, Any]:
    properties = types.SimpleNamespace(name=DEVICE, total_memory=_CAPACITY, multi_processor_count=1)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "device": _as_current,
        "device_count": compiled.num_devices,
        "current_device": compiled.current_device,
        "set_device": lambda device: compiled.set_device(_index(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
        "get_device_name": lambda _=None: DEVICE,
        "get_device_properties": lambda _=None: properties,
        "get_device_capability": lambda _=None: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
    }


def _streams() -> dict[str, Any]:
    return {
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "set_stream": torch.accelerator.set_stream,
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "default_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
    }


def _random(compiled: Any) -> dict[str, Any]:
    generator = compiled.default_generator()
    return {
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda _=None: generator.get_state(),
        "set_rng_state": lambda state, _=None: generator.set_state(state),
        "default_generators": [generator] * compiled.num_devices(),
    }


def _memory(compiled: Any) -> dict[str, Any]:
    in_use, peak = (lambda _=None: compiled.bytes_in_use()), (lambda _=None: compiled.peak_bytes())
    return {
        "memory_allocated": in_use,
        "memory_reserved": in_use,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda _=None: compiled.reset_peak(),
        "empty_cache": lambda: None,
        "mem_get_info": lambda _=None: (_CAPACITY - compiled.bytes_in_use(), _CAPACITY),
        "memory_stats": lambda _=None: defaultdict(int),
    }
