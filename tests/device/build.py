"""The simulated device's extension: built on demand, with the compiler that is there, and kept for later runs."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch.utils import cpp_extension

__all__ = ["build", "cached", "load", "missing", "run_as_main"]

_NAME = "_distprune_simulated"
_ROOT = Path(__file__).parents[2]
_SOURCES = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))


@functools.cache
def missing() -> str:
    """Return what the machine lacks to build the extension, or nothing."""
    if sys.platform != "linux":
        return "the simulated device needs Linux, which maps memory twice"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "the simulated device needs a C++ compiler"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the simulated device needs Python's headers"
    if not cpp_extension.is_ninja_available():
        return "the simulated device needs ninja"
    return ""


def cached(name: str, make: Callable[[str], None]) -> Path:
    """Return the file ``name`` in the user's cache. Where there is none, ``make`` writes it to the path it is given.

    Of several processes one makes it, and the others wait.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distprune-tests"
    made = cache / name
    if not made.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / "lock"), tempfile.TemporaryDirectory(dir=cache) as beside:
            if not made.exists():
                make(str(Path(beside) / name))
                (Path(beside) / name).rename(made)
    return made


def build() -> Path:
    """Return the extension, which is compiled where it is not yet: half a minute."""
    digest = hashlib.sha256("\0".join([torch.__version__, sys.version, *(p.read_text() for p in _SOURCES)]).encode())
    # torch loads what it has built, which gives the process the device: a process of its own.
    return cached(
        f"simulated-{digest.hexdigest()[:16]}.so",
        lambda path: run_as_main(__name__, path),
    )


def run_as_main(module: str, path: str) -> None:
    """Run ``python -m module path`` in a process of its own."""
    subprocess.run([sys.executable, "-m", module, path], check=True, stdout=sys.stderr, cwd=_ROOT)


def load() -> Any:
    """Load the extension into this process, which has the device ever after."""
    spec = importlib.util.spec_from_file_location(_NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(path: str) -> None:
    sources = [str(source) for source in _SOURCES if source.suffix == ".cpp"]
    flags = ["-O1", "-g0", "-w"]
    with tempfile.TemporaryDirectory() as folder:
        cpp_extension.load(_NAME, sources, extra_cflags=flags, build_directory=folder, verbose=True)
        shutil.move(Path(folder) / f"{_NAME}.so", path)


if __name__ == "__main__":
    _compile(sys.argv[1])
