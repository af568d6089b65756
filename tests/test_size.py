"""How many lines of code each folder has: no folder grows, and those above their goal shrink."""

from __future__ import annotations

import ast
import collections
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "distprune"
# By folder, "." the files beside them: the most lines of code that it may have, and the goal.
LINES = {
    ".": (427, 320),
    "calibration": (2075, 1350),
    "checkpoint": (1532, 1180),
    "cli": (595, 410),
    "collectives": (658, 640),
    "jobs": (2106, 1280),
    "kernels": (850, 800),
    "masks": (504, 470),
    "models": (1022, 690),
    "oneshot": (1949, 1440),
    "patterns": (1406, 690),
    "pruning": (1475, 960),
    "removal": (1583, 1160),
    "scores": (386, 350),
    "selection": (487, 520),
    "shards": (1335, 1030),
    "training": (1640, 1030),
}

ABOVE = {  # why a folder stays above its goal: what users see there
    ".": "what a misspelled name or argument may have meant; sparsity by layer of any model or file",
    "calibration": "windows that ranks share (tensor parallelism), tokens sent to experts, own words by one CUDA graph",
    "checkpoint": "experts that transformers fuses, revisions of the hub, parts of files, what must not be trusted",
    "cli": "help from docstrings, what a misspelled option may have meant, mpiexec and srun",
    "collectives": "MPI beside process groups",
    "jobs": "compare, card, picture, --plan, --tasks; every kind of job resumes",
    "kernels": "rows longer than a program's registers; weights written in place without a mask",
    "masks": "products of masks and weights that are computed",
    "models": "what is no weight: routers, scales, adapters, gains, tables of 215 families",
    "oneshot": "channel order, shares by layer, mixtures, SparseGPT and ADMM over cut rows",
    "patterns": "users' patterns; the same by kernels; blocks and channels that edges cut, summed exactly",
    "pruning": "all of torch.nn.utils.prune; evidence and masks that users bring; reports",
    "removal": "sizes for a budget by trials; experts and layers; four criteria beside the best",
    "scores": "scores of users, and of pieces of a file",
    "shards": "FSDP1's flat parameters, copies over ranks, weights that share memory or lie transposed",
    "training": "copies, pickles and moves of held models; wrapped, fused and sharded optimizers; regrowth",
}


def lines_of_code(path: Path) -> int:
    """Return how many lines hold code: no docstrings, comments or blanks."""
    text = path.read_text()
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type not in (tokenize.COMMENT, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            code.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code)


def test_no_folder_grows() -> None:
    sizes = collections.Counter[str]()
    for path in PACKAGE.rglob("*.py"):
        sizes[path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "."] += lines_of_code(path)
    assert sizes.keys() == LINES.keys()
    assert {folder: num for folder, num in sizes.items() if num > LINES[folder][0]} == {}
    assert {folder for folder, (num, goal) in LINES.items() if num > goal} == ABOVE.keys()
