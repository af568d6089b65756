"""What the README shows runs, on one process and under torchrun, and prints the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import readme_table

ROOT = Path(__file__).parent.parent


@pytest.mark.launcher
@pytest.mark.parametrize(
    ("example", "said"),
    [
        (0, ["524,288 of 1,048,576 weights stayed pruned", "262,144 of 1,048,576 weights stayed pruned"]),
        (1, ["1,048,576 of 2,097,152 weights are zero, 7 rounds"]),
    ],
)
def test_examples(tmp_path: Path, example: int, said: list[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    program = tmp_path / "prune.py"
    program.write_text(code[example])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outputs = [
        subprocess.run([*start, str(program)], env=environment, capture_output=True, text=True, timeout=120, check=True)
        for start in ([sys.executable], torchrun)
    ]
    # One process, then two ranks, which may write into one line.
    text = "".join(output.stdout for output in outputs)
    assert [text.count(line) for line in said] == [3] * len(said)
    assert text.count(" weights ") == 3 * len(said)


def test_every_example_is_run() -> None:
    assert len(re.findall(r"```python\n", (ROOT / "README.md").read_text())) == 2


def test_the_table_is_the_contract() -> None:
    assert readme_table() in (ROOT / "README.md").read_text()
