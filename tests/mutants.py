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
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

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

    def apply_to(self, package: Path) -> None:
        """Write the fault into the copy of the library at ``package``.

        Raises:
            ValueError: ``old`` does not stand there exactly once.
        """
        path = package / self.file
        text = path.read_text("utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} holds {self.old!r} {text.count(self.old)} times, not once: {self.what}")
        path.write_text(text.replace(self.old, self.new), "utf-8")


@dataclass(frozen=True)
class Outcome:
    """``suite`` killed it, by ``test``, after ``seconds`` in all; no suite, and it lives."""

    mutant: Mutant
    suite: str | None
    test: str
    seconds: float


def read_mutants() -> list[Mutant]:
    """Return the mutants of the list."""
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry.get("tests", ()))}) for entry in entries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only mutants whose file or description contains one of these")
    parser.add_argument("--table", type=Path, help="write the table there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--first", action="store_true", help="only the tests of the mutant's folder")
    options = parser.parse_args()
    chosen = [m for m in read_mutants() if not options.names or any(name in m.file + m.what for name in options.names)]
    killers = _killers(options.table) if options.table is not None else {}
    with _copies(options.jobs) as copies, ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda mutant: _try(mutant, copies, options.first, killers), chosen):
            outcomes.append(outcome)
            print(_row(outcome), flush=True)
    text = _table(outcomes)
    if options.table is not None:
        options.table.write_text(text, "utf-8")
    print(text.rpartition("\n\n")[0] if options.table is None else f"written to {options.table}")


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


def _try(mutant: Mutant, copies: SimpleQueue[Path], first_only: bool, killers: dict[tuple[str, str], str]) -> Outcome:
    copy, started = copies.get(), time.monotonic()
    first = mutant.first_tests
    suites: list[tuple[str, list[str]]] = [("default", first)]
    if killer := killers.get((mutant.file, mutant.what)):
        suites.insert(0, ("default", [killer]))
    if not first_only:
        suites += [("default", []), ("whole", ["--whole", *first]), ("whole", ["--whole"])]
    try:
        mutant.apply_to(copy / "distprune")
        for suite, arguments in suites:
            if test := _failed_test(copy, arguments):
                return Outcome(mutant, suite, test, time.monotonic() - started)
        return Outcome(mutant, None, "", time.monotonic() - started)
    finally:
        shutil.copy2(ROOT / "distprune" / mutant.file, copy / "distprune" / mutant.file)
        copies.put(copy)


def _killers(table: Path) -> dict[tuple[str, str], str]:
    """Return the tests that an earlier table names, by file and fault: they run first. A test that moved fails none."""
    rows = (line.strip("| ").split(" | ") for line in table.read_text("utf-8").splitlines()) if table.exists() else ()
    found = {(row[0], row[1]): row[4] for row in rows if len(row) == 5}
    return {fault: test for fault, test in found.items() if (ROOT / test.partition("::")[0]).is_file()}


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
            if process.wait() == 0:
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


def _row(outcome: Outcome) -> str:
    mutant = outcome.mutant
    killed = {"default": ("yes", "yes"), "whole": ("no", "yes"), None: ("no", "no")}[outcome.suite]
    return f"| {mutant.file} | {mutant.what} | {killed[0]} | {killed[1]} | {outcome.test} |"


def _table(outcomes: Sequence[Outcome]) -> str:
    num_default = sum(outcome.suite == "default" for outcome in outcomes)
    num_whole = sum(outcome.suite is not None for outcome in outcomes)
    lines = [
        "# Mutants",
        "",
        "`python -m tests.mutants --table FILE`: one fault at a time, and the first test that finds it.",
        "",
        f"{len(outcomes)} mutants; the default suite kills {num_default}, `--whole` {num_whole}.",
        "",
        "| file | fault | default | whole | by |",
        "|---|---|---|---|---|",
        *map(_row, outcomes),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
