"""Every kernel compiles for a Hopper GPU, and keeps its numbers in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def spills(*names: str) -> dict[str, int]:
    """Return how many bytes spill, by kernel: in a process that does not interpret."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compiled", *names]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


FEW = ("count False magnitude bf16", "write_lowest magnitude bf16", "rows False 1024 magnitude bf16", "narrow", "sweep")


@pytest.mark.parametrize("names", [FEW, pytest.param((), marks=pytest.mark.whole)], ids=["some", "all"])
def test_nothing_spills(names: tuple[str, ...]) -> None:
    spilled = spills(*names)
    assert len(spilled) >= (len(names) or 60)
    assert {name: num for name, num in spilled.items() if num > 16} == {}
