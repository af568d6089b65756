"""The layers, read from the imports: a folder imports itself and lower levels only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "distprune"

LEVEL = {
    "collectives": 0,
    "kernels": 0,
    "shards": 1,
    "models": 2,
    "scores": 3,
    "selection": 3,
    "checkpoint": 3,
    "figure": 4,
    "patterns": 4,
    "masks": 4,
    "pruning": 5,
    "calibration": 5,
    "oneshot": 6,
    "training": 6,
    "evaluation": 6,
    "removal": 7,
    "jobs": 8,
    "cli": 9,
    "__main__": 10,
}
# Communicate outside of collectives/ and our counting goes wrong; torch's own internals may.
COLLECTIVE_NAMES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "all_to_all",
    "barrier",
    "broadcast_object_list",
    "full_tensor",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "redistribute",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
}
FILES = sorted(PACKAGE.rglob("*.py"))
OURS = [
    path
    for folder in ("distprune", "tests", "benchmarks", "launch")
    for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
]


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "distprune" else [f"distprune.{a.name}" for a in node.names]
        for name in names:
            if name.startswith("distprune."):
                yield name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_itself_and_lower_levels_only(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return  # the public names
    assert part in LEVEL, f"{part} has no level yet; give it one here and in its docstring"
    for other in imported_parts(ast.parse(path.read_text())):
        assert other == part or LEVEL[other] < LEVEL[part], f"{path}: {part} imports {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_collectives_communicates(path: Path) -> None:
    if part_of(path) == "collectives":
        return
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not called & COLLECTIVE_NAMES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_torch_are_looked_up(path: Path) -> None:
    """An import of one would fail where torch has moved it; ``shards.private`` does not."""
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = f"{module}.{alias.name}"
            assert not (name.strip(".").startswith("torch") and "._" in name), name


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_no_file_past_400_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
