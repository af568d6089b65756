"""The layers, read from the imports: a folder imports itself and lower levels only."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "distprune"

LEVEL = {
    "mistakes": -1,
    "formatting": 0,
    "collectives": 0,
    "hints": 0,
    "totals": 1,
    "version": 0,
    "shards": 1,
    "kernels": 2,
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
# Of torch, without device= they follow torch.set_default_device, and without dtype= most set_default_dtype.
COUNTING = {"arange", "randint", "randperm", "range", "tril_indices", "triu_indices"}  # int64, given integers
FACTORIES = COUNTING | {
    "as_tensor",
    "asarray",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randn",
    "scalar_tensor",
    "tensor",
    "zeros",
}
FILES = sorted(PACKAGE.rglob("*.py"))
OURS = [
    path
    for folder in ("distprune", "tests", "benchmarks", "launch")
    for path in sorted((PACKAGE.parent / folder).rglob("*.py"))
]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


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


def test_imports_itself_and_lower_levels_only() -> None:
    wrong = []
    for path in FILES:
        part = part_of(path)
        if part == "__init__":
            continue  # the public names
        if part not in LEVEL:
            wrong.append(f"{part} has no level yet; give it one here and in its docstring")
        others = {other for other in imported_parts(tree_of(path)) if other != part}
        wrong += [f"{path}: {part} imports {other}" for other in others if LEVEL[other] >= LEVEL.get(part, 0)]
    assert not wrong, "\n".join(wrong)


def test_only_collectives_communicates() -> None:
    wrong = {
        f"{path}:{node.lineno} calls {node.func.attr}"
        for path in FILES
        if part_of(path) != "collectives"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in COLLECTIVE_NAMES
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_private_names_of_torch_are_looked_up() -> None:
    """An import of one would fail where torch has moved it; ``shards.private`` does not."""
    wrong = []
    for path in FILES:
        for node in tree_of(path).body:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            wrong += [f"{path}: {name}" for name in names if name.startswith("torch") and "._" in name]
    assert not wrong, "\n".join(wrong)


def test_factories_say_device_and_dtype() -> None:
    """The process may have set defaults, which are the model's affair."""
    wrong, num_seen = [], 0
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES:
                num_seen += 1
                needed = {"device"} if node.func.attr in COUNTING else {"device", "dtype"}
                missing = needed - {keyword.arg for keyword in node.keywords}
                wrong += [f"{path}:{node.lineno}: torch.{node.func.attr} without {name}=" for name in sorted(missing)]
    assert num_seen > 100
    assert not wrong, "\n".join(wrong)


def test_no_class_has_the_name_of_another() -> None:
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(PACKAGE)))
    twice = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert twice.keys() == {"SparseTrainingCallback"}, twice  # of two trainers, which nobody has both of


def test_imports_within_functions_are_of_optional_extras() -> None:
    extras = {"mpi4py", "resource"}  # and what one system has
    wrong = [
        f"{path}:{node.lineno}"
        for path in FILES
        for function in ast.walk(tree_of(path))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not extras & {(getattr(node, "module", None) or node.names[0].name).partition(".")[0]}
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_past_400_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in OURS}
    assert len(lengths) > 300
    assert {path: length for path, length in lengths.items() if length > 400} == {}
