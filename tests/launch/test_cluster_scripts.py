"""The scripts for clusters start distprune with what they are given, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
STARTERS = {"torchrun_multi_node.sh": "torchrun", "slurm.sbatch": "srun", "mpirun.sh": "mpiexec"}


@pytest.mark.parametrize("script", STARTERS)
def test_the_command_is_the_users(tmp_path: Path, script: str) -> None:
    starter = tmp_path / STARTERS[script]
    starter.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    starter.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    asked = ["--pattern", "2:4", "--calibration", "a text.txt"]
    command = ["bash", str(LAUNCH / script), "model", "out", *asked]
    words = subprocess.check_output(command, env={"PATH": path, "PYTHON": sys.executable}, text=True).splitlines()
    assert words[words.index("-m") :] == ["-m", "distprune", "prune", "model", "--output", "out", *asked]
    assert words[0].startswith("-")
