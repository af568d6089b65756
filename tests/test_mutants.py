"""The list of deliberate faults is up to date: each stands once in the library, and is Python."""

from __future__ import annotations

import collections
from pathlib import Path

from tests.mutants import ROOT, read_mutants


def test_each_mutant_applies(tmp_path: Path) -> None:
    mutants = read_mutants()
    wrong = []
    for mutant in mutants:
        copy = tmp_path / mutant.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / "distprune" / mutant.file).read_bytes())
        try:
            with mutant.applied_to(tmp_path):
                compile(copy.read_text("utf-8"), mutant.file, "exec")
        except (ValueError, SyntaxError) as error:
            wrong.append(str(error))
        wrong += [f"{mutant.file}: no {test}" for test in mutant.first_tests if not (ROOT / test).exists()]
    assert not wrong


def test_mutants_are_spread_over_all_folders() -> None:
    counts = collections.Counter(Path(mutant.file).parts[0] for mutant in read_mutants())
    folders = {path.name for path in (ROOT / "distprune").iterdir() if (path / "__init__.py").exists()}
    assert folders <= counts.keys()
    assert counts.total() >= 80
