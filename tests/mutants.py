"""How many deliberate faults the tests find: ``python -m tests.mutants`` makes the table.

Noun: a *mutant* is the library with one small fault in it; a test suite *kills* it by failing. ``mutants.toml``, beside
this file, lists them: ``old`` stands once in ``file`` and becomes ``new``. For each of them a copy of the tree is
mutated, and suites run in it until one fails: the test that an earlier table names, the tests of its folder, all tests
that run by default, and then the folder's and all others with ``--whole``. A test that hangs has failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

__all__ = ["Mutant", "read_mutants"]

ROOT = Path(__file__).parent.parent
_LONGEST_TEST = 180  # seconds; no test takes half of it
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", re.MULTILINE)
_STARTED = re.compile(r"^(tests/[^\n]*?\.py::.*?)(?: (?:PASSED|SKIPPED|XFAIL).*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """``file`` is below the package. ``tests``: what runs first, below tests/; by default the folder of ``file``."""

    file: str
    what: str
    old: str
    new: str
    tests: tuple[str, ...] = ()

    @property
    def first_tests(self) -> list[str]:
        """Return what runs first."""
        own = f"tests/{Path(self.file).parts[0].removesuffix('.py')}"
        folder = own if (ROOT / own).is_dir() else f"tests/test_{Path(self.file).stem}.py"
        return [f"tests/{name}" for name in self.tests] or [folder]

    @contextmanager
    def applied_to(self, package: Path) -> Iterator[None]:
        """Have the fault in the copy of the library at ``package`` while the body runs.

        Raises:
            ValueError: ``old`` does not stand there exactly once.
        """
        path = package / self.file
        text = path.read_text("utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} holds {self.old!r} {text.count(self.old)} times, not once: {self.what}")
        path.write_text(text.replace(self.old, self.new), "utf-8")
        try:
            yield
        finally:
            path.write_text(text, "utf-8")


@dataclass(frozen=True)
class Outcome:
    """``suite``, ``"default"`` or ``"whole"``, killed it, by ``test``; ``""``: it lives."""

    suite: str
    test: str


def read_mutants() -> list[Mutant]:
    """Return the mutants of the list."""
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry.get("tests", ()))}) for entry in entries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutants whose file or description contains one of these")
    parser.add_argument(
        "--table", type=Path, help="the table: what it has of others stays, and the tests it names run first"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--first", action="store_true", help="only the tests of the mutant's folder")
    options = parser.parse_args()
    mutants = read_mutants()
    chosen = [m for m in mutants if not options.names or any(name in m.file + m.what for name in options.names)]
    outcomes = _read_table(options.table, mutants) if options.table is not None else {}
    with _copies(options.jobs) as copies, ThreadPoolExecutor(options.jobs) as pool:
        tried = [pool.submit(_try, mutant, copies, options.first, outcomes.get(mutant)) for mutant in chosen]
        for done in as_completed(tried):
            mutant, outcome = chosen[tried.index(done)], done.result()
            print(_row(mutant, outcome), flush=True)
            if outcome.suite or not options.first:  # else others may find it
                outcomes[mutant] = outcome
            if options.table is not None:
                options.table.write_text(_table(mutants, outcomes), "utf-8")
    print(_table(mutants, outcomes).split("\n\n")[2])


@contextmanager
def _copies(num: int) -> Iterator[SimpleQueue[Path]]:
    """Yield copies of the tree that nobody uses; who takes one puts it back as it was."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num):
            copy = Path(folder) / str(number)
            for name in filter(None, tracked):
                if (ROOT / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, copy / name)
            copies.put(copy)
        yield copies


def _try(mutant: Mutant, copies: SimpleQueue[Path], first_only: bool, known: Outcome | None) -> Outcome:
    copy = copies.get()
    first = mutant.first_tests
    suites: list[tuple[str, list[str]]] = [("default", first)]
    if known is not None and known.suite == "default" and (ROOT / known.test.partition("::")[0]).is_file():
        suites.insert(0, ("default", [known.test]))
    if not first_only:
        suites += [("default", []), ("whole", ["--whole", *first]), ("whole", ["--whole"])]
    try:
        with mutant.applied_to(copy / "distprune"):
            for suite, arguments in suites:
                if test := _failed_test(copy, arguments):
                    return Outcome(suite, test)
        return Outcome("", "")
    finally:
        copies.put(copy)


def _failed_test(copy: Path, arguments: Sequence[str]) -> str:
    """Return the first test that fails in ``copy``; ``""`` if all pass, or if none of that name is there."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=line", "-p", "no:cacheprovider", *arguments]
    command += ["-o", f"faulthandler_timeout={_LONGEST_TEST}", "-o", "faulthandler_exit_on_timeout=true"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if process.wait() in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):  # a row left out by default
                return ""
        finally:
            _end_group(process)
        output.seek(0)
        text = output.read()
    if "\nERROR: not found: " in text:
        return ""
    found = _FAILED.findall(text) or _STARTED.findall(text)[-1:]
    return found[0] if found else (text.strip().splitlines() or ["a killed run"])[-1]


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def _row(mutant: Mutant, outcome: Outcome) -> str:
    default, whole = ("yes" if outcome.suite in suites else "no" for suites in (("default",), ("default", "whole")))
    return f"| {mutant.file} | {mutant.what} | {default} | {whole} | {outcome.test} |"


def _read_table(table: Path, mutants: Sequence[Mutant]) -> dict[Mutant, Outcome]:
    """Return what an earlier table says of mutants that are still listed."""
    by_fault = {(mutant.file, mutant.what): mutant for mutant in mutants}
    found = {}
    for line in table.read_text("utf-8").splitlines() if table.exists() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and (mutant := by_fault.get((cells[0], cells[1]))):
            found[mutant] = Outcome("default" if cells[2] == "yes" else "whole" if cells[3] == "yes" else "", cells[4])
    return found


def _table(mutants: Sequence[Mutant], outcomes: Mapping[Mutant, Outcome]) -> str:
    num_default = sum(outcome.suite == "default" for outcome in outcomes.values())
    num_whole = sum(outcome.suite != "" for outcome in outcomes.values())
    lines = [
        "# Mutants",
        "",
        "`python -m tests.mutants --table FILE`: one fault at a time, and the first test that finds it.",
        "",
        f"{len(outcomes)} of {len(mutants)} were tried; the default suite kills {num_default}, `--whole` {num_whole}.",
        "",
        "| file | fault | default | whole | by |",
        "|---|---|---|---|---|",
        *(_row(mutant, outcomes[mutant]) for mutant in mutants if mutant in outcomes),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
