"""What the README shows runs, on one process and under torchrun, and prints the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.launcher
def test_the_first_example(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    program = tmp_path / "prune.py"
    program.write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outputs = [
        subprocess.run([*start, str(program)], env=environment, capture_output=True, text=True, timeout=120, check=True)
        for start in ([sys.executable], torchrun)
    ]
    # One process, then two ranks, which may write into one line.
    text = "".join(output.stdout for output in outputs)
    assert text.count("1,048,576 of 2,097,152 weights are zero, 10 rounds") == 3
    assert text.count("weights are zero") == 3
