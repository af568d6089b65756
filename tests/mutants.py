"""Faults that a machine makes: one comparison, constant, operator or early return of the library is changed.

``tests/try_mutants.py`` tries them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

__all__ = ["ROOT", "Mutant", "all_folders", "drawn", "mutants_of"]

ROOT = Path(__file__).parent.parent
_COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_UNSEEN = {"strict", "stacklevel", "frozen", "slots", "timeout"}  # arguments whose values no result depends on


@dataclass(frozen=True)
class Mutant:
    """``file`` is below the package; bytes ``start`` to ``end``, of the statement in ``lines``, become ``new``."""

    file: str
    lines: range
    start: int
    end: int
    old: str
    new: str

    def text(self, package: Path) -> bytes:
        """Return the file with the fault."""
        text = (package / self.file).read_bytes()
        return text[: self.start] + self.new.encode() + text[self.end :]

    @override
    def __str__(self) -> str:
        return f"{self.file}:{self.lines[0]} `{_short(self.old)}` → `{_short(self.new)}`"


def _short(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 60 else f"{text[:28]} … {text[-28:]}"


class _Faults(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, file: str, text: str) -> None:
        self.mutants: list[Mutant] = []
        self._file, self._text = file, text.encode()
        self._line_starts = [0]
        for line in self._text.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._statement: ast.stmt = ast.Pass()
        self.visit(ast.parse(text))

    def _add(self, node: ast.expr, new: str) -> None:
        start = self._line_starts[node.lineno - 1] + node.col_offset
        end = self._line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        head = self._statement
        body = getattr(head, "body", [])
        last = body[0].lineno - 1 if body else head.end_lineno or 0
        lines = range(head.lineno, max(last, head.lineno) + 1)
        old = self._text[start:end].decode()
        self.mutants.append(Mutant(self._file, lines, start, end, old, new))

    @override
    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
            return  # what errors say, and what cannot be
        if isinstance(node, ast.stmt):
            self._statement = node
        super().visit(node)

    @override
    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    @override
    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    @override
    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    @override
    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not ast.unparse(node.value.func).startswith("warnings."):
            self.generic_visit(node)

    @override
    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _UNSEEN:
            self.generic_visit(node)

    @override
    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test) or "__name__" in ast.unparse(node.test):
            return
        self._add(node.test, "False")  # an early return, a refusal, or a case is left out
        self.generic_visit(node)

    @override
    def visit_Compare(self, node: ast.Compare) -> None:
        changed = copy.deepcopy(node)
        changed.ops[0] = _COMPARISONS[type(node.ops[0])]()
        self._add(node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    @override
    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _OPERATORS and not _is_no_number(node):
            changed = copy.deepcopy(node)
            changed.op = _OPERATORS[type(node.op)]()
            self._add(node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    @override
    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    @override
    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    @override
    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, str(node.value + 1))


def _is_no_number(node: ast.AST) -> bool:
    """Whether ``node`` joins texts, or types (``int | None``)."""
    parts = [*ast.walk(node)]
    constants = [part.value for part in parts if isinstance(part, ast.Constant)]
    return any(isinstance(part, ast.JoinedStr) for part in parts) or any(
        value is None or isinstance(value, str) for value in constants
    )


def all_folders() -> list[str]:
    """Return the folders of the package, and "."."""
    return [".", *sorted(path.parent.name for path in (ROOT / "distprune").glob("*/__init__.py"))]


def mutants_of(package: Path, folders: Sequence[str]) -> list[Mutant]:
    """Return all mutants of the files below ``folders`` of the package; ``"."``: of those beside them."""
    mutants = []
    for folder in folders:
        for path in sorted((package / folder).glob("*.py" if folder == "." else "**/*.py")):
            mutants += _Faults(str(path.relative_to(package)), path.read_text("utf-8")).mutants
    return mutants


def drawn(mutants: Sequence[Mutant], num: int, shift: float = 0.5) -> list[Mutant]:
    """Return ``num`` of them at equal distances; another ``shift`` (0 to 1) returns others."""
    num = min(num, len(mutants))
    return [mutants[int((i + shift) * len(mutants) / num)] for i in range(num)]
