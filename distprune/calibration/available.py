"""How much memory a process can still have: on the host, by what the system says and its limits, and on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

_MEMORY, _OWN_GROUPS, _GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Of control groups, by what /proc says before their path: where they are, and the files and the word in them.
_VERSIONS = {
    "": (_GROUPS, "memory.max", "memory.current", "inactive_file"),
    "memory": (_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(device: torch.device) -> int | None:
    """Return how many bytes can still be had on ``device``; ``None``: nobody says. Local."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    return min((num for num in (_of_system(), *_of_groups()) if num is not None), default=None)


def _of_system() -> int | None:
    """Return what Linux can give without swapping."""
    lines = _lines(_MEMORY)
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _of_groups() -> Iterator[int]:
    """Yield what is left of the limit of each control group that this process is in. Pages of files give way."""
    for line in _lines(_OWN_GROUPS):
        _, version, path = line.split(":", 2)
        if version not in _VERSIONS:
            continue
        root, limit_name, used_name, word = _VERSIONS[version]
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            limit, used = _lines(folder / limit_name), _lines(folder / used_name)
            if limit and used and limit[0].isdecimal():
                stat = (of.split() for of in _lines(folder / "memory.stat"))
                pages = next((int(num) for name, num in stat if name == word), 0)
                yield max(0, int(limit[0]) - int(used[0]) + pages)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
