"""What the machine that makes faults makes, and that all of them are Python."""

from __future__ import annotations

from pathlib import Path

from tests.mutants import ROOT, all_folders, drawn, mutants_of

_TEXT = '''
"""Says 7."""
WIDTH: int = 8


def half(values: list[int], *, strict: bool = True) -> int:
    """Return 1."""
    if not values or len(values) > 2 * WIDTH:
        raise ValueError(f"{1 + len(values)}")
    return sum(zip(values, strict=True)) // 2
'''


def test_faults_of_a_small_file(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(_TEXT)
    assert [(mutant.lines, mutant.old, mutant.new) for mutant in mutants_of(tmp_path, ["."])] == [
        (range(3, 4), "8", "9"),
        (range(6, 7), "True", "False"),
        (range(8, 9), "not values or len(values) > 2 * WIDTH", "False"),
        (range(8, 9), "not values or len(values) > 2 * WIDTH", "(not values and len(values) > 2 * WIDTH)"),
        (range(8, 9), "not values", "(values)"),
        (range(8, 9), "len(values) > 2 * WIDTH", "(len(values) >= 2 * WIDTH)"),
        (range(8, 9), "2 * WIDTH", "(2 + WIDTH)"),
        (range(8, 9), "2", "3"),
        (range(10, 11), "sum(zip(values, strict=True)) // 2", "(sum(zip(values, strict=True)) * 2)"),
        (range(10, 11), "2", "3"),
    ]


def test_faults_of_the_library_are_python() -> None:
    mutants = mutants_of(ROOT / "distprune", all_folders())
    assert len(mutants) > 5_000
    for mutant in drawn(mutants, 100):
        compile(mutant.text(ROOT / "distprune"), mutant.file, "exec")
