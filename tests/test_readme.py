"""What the README shows runs, on one process and on two ranks, and prints the same; what it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract import readme_table
from tests.hf_models import make_model
from tests.started import run_script
from tests.training.optimizers import optimizer_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SETUP = EXAMPLES[0].partition("\n\nreport = ")[0]  # the imports and the model, with which the others go on

# What the examples print.
SAID = (
    (
        "Unstructured(sparsity=0.5, scope='global') by magnitude\n  50.0 % of 2.1 M prunable weights are zero, 49.9 % "
        "of all 2.1 M\n  highest sparsities:\n    66.7 %  2.weight\n    33.3 %  0.weight\n"
        "  1.0 M weights newly pruned in WHAT IT TOOK\n54.0% of the weights are zero\n"
    ),
    "943,718 of 1,048,576 weights are zero, 5 rounds\n",
    "80.0% of the weights are zero, and stay so\n",
    "80.0% of the weights are held\n",
    "saliency: 1,048,576 weights are zero\n",
    "33.9% of the weights are zero\n",
    "torch.Size([2048, 512]) 65.0%\nTrue\nTrue\n1.0\n",
    "True: 60.0% of the weights are masked\n",
    "2 blocks, 50.0% of the weights are zero\nTrue\n",
    "96 channels are left, and 82240 parameters\n",
    "30.0% of the weights are zero\n",
)

# Runs examples, each in a namespace of its own, and writes what they print. A process makes one process group.
RUNNER = """
import contextlib, os, pathlib, sys
import torch.distributed as dist

init_process_group = dist.init_process_group
dist.init_process_group = lambda: dist.is_initialized() or init_process_group()
for path in map(pathlib.Path, sys.argv[1:]):
    code = compile(path.read_text(), path, "exec")
    with path.with_suffix("." + os.environ.get("RANK", "alone")).open("w") as file:
        with contextlib.redirect_stdout(file):
            exec(code, {"__name__": "__main__"})
"""


@pytest.mark.launcher
def test_examples(tmp_path: Path) -> None:
    paths = [tmp_path / f"example{number}.py" for number in range(len(EXAMPLES))]
    for path, example in zip(paths, EXAMPLES, strict=True):
        path.write_text(example if example is EXAMPLES[0] else f"{SETUP}\n{example}")
    make_model(tmp_path / "build" / "demo" / "smollm2-135m")  # a small one in the place of the demo's
    runner = tmp_path / "runner.py"
    runner.write_text(RUNNER)
    for num_ranks in (0, 2):
        run_script(num_ranks, tmp_path, str(runner), *map(str, paths))
    for path, said in zip(paths, SAID, strict=True):
        for who in ("alone", "0", "1"):
            text = path.with_suffix(f".{who}").read_text()
            assert (who, re.sub(r"in [\d.]+ s, .*$", "in WHAT IT TOOK", text, flags=re.MULTILINE)) == (who, said)


def test_excerpts_are_the_scripts() -> None:
    (excerpt,) = re.findall(r"```py\n(.*?)```", README, flags=re.DOTALL)
    script = (ROOT / "launch" / "trainer_sparse.py").read_text().splitlines()
    assert [line for line in excerpt.splitlines() if line not in script] == []


def test_the_tables_are_the_contracts() -> None:
    assert readme_table() in README
    assert optimizer_table() in README


def test_every_file_that_is_named_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not link.startswith("https:") and not (ROOT / link).exists()] == []
