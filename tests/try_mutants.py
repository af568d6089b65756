"""Which of the faults that a machine makes the tests find.

    python -m pytest -p tests.try_mutants -n 2 --dist loadgroup     # once: which tests run which lines
    python -m tests.try_mutants --num 400 --table tests/mutants.md  # draws evenly from the folders of --folders

Noun: a test *kills* a mutant by failing. The tests that run the changed lines try it, the quick ones first; where none
is known to, those of its folder. What lives is listed: nobody can see the change, or a test is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import ROOT, Mutant, all_folders, drawn, mutants_of

MAP = ROOT / ".mutants"  # of each process that ran tests: their seconds, and by file and line which of them ran it
_GOLDEN = (5**0.5 - 1) / 2
# Of the tests that try one mutant: those that are collected first, and all of them.
_FEW_FILES, _FEW_SECONDS, _MOST_SECONDS = 6, 30, 150

# ---- as a plugin of pytest: which tests run which lines


class _Mapper:
    def __init__(self) -> None:
        coverage: Any = import_module("coverage")
        self.coverage = coverage.Coverage(data_file=None, include=[str(ROOT / "distprune/*")], config_file=False)
        self.seconds: dict[str, float] = {}
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        start = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - start
        self.coverage.switch_context("")
        return result

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for file in data.measured_files():
            by_line = data.contexts_by_lineno(file)
            lines[str(Path(file).relative_to(ROOT / "distprune"))] = {
                line: [context for context in contexts if context] for line, contexts in by_line.items()
            }
        MAP.mkdir(exist_ok=True)
        path = MAP / f"{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}.json"
        path.write_text(json.dumps({"seconds": self.seconds, "lines": lines}), "utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("tx", None):
        config.pluginmanager.register(_Mapper())


class _Map:
    """Which tests run a line, and how long each takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._by_file: dict[str, set[str]] = defaultdict(set)
        for path in MAP.glob("*.json"):
            part = json.loads(path.read_text("utf-8"))
            self.seconds.update(part["seconds"])
            for file, lines in part["lines"].items():
                for line, tests in lines.items():
                    self._by_line[file, int(line)].update(tests)
                    self._by_file[file].update(tests)
        if not self.seconds:
            raise SystemExit(f"{MAP} is empty: run the first command of {__file__}")

    def stages_of(self, mutant: Mutant) -> list[list[str]]:
        """Return the tests that may kill it, those of its folder first: a few files of them, and all others."""
        tests: set[str] = set().union(*(self._by_line.get((mutant.file, line), set()) for line in mutant.lines))
        folder = f"tests/{Path(mutant.file).parts[0].removesuffix('.py')}"
        if not tests:  # it runs as the file is imported, or in other processes
            tests = {test for test in self.seconds if test.startswith((folder, f"{folder}.py"))}
            tests |= self._by_file.get(mutant.file, set())
        ordered = sorted(tests, key=lambda test: (not test.startswith(folder), self.seconds[test], test))
        files, first, others, seconds = set[str](), list[str](), list[str](), 0.0
        for test in ordered:
            file = test.partition("::")[0]
            if (file in files or len(files) < _FEW_FILES) and seconds < _FEW_SECONDS:
                files.add(file)
                first.append(test)
                seconds += self.seconds[test]
            elif seconds + self.seconds[test] < _MOST_SECONDS:
                others.append(test)
                seconds += self.seconds[test]
        return [stage for stage in (first, others) if stage]


# ---- as a command: which mutants live


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folders", nargs="+", default=all_folders(), help="of the package; '.': the files beside them"
    )
    parser.add_argument("--num", type=int, default=400, help="how many are drawn, evenly over the folders")
    parser.add_argument("--shift", type=float, default=0.5, help="0 to 1: another one draws others")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--table", type=Path, help="where the report is written")
    options = parser.parse_args()
    chosen = drawn(mutants_of(ROOT / "distprune", options.folders), options.num, options.shift)
    chosen = [chosen[i] for i in sorted(range(len(chosen)), key=lambda i: i * _GOLDEN % 1)]  # so a part is even, too
    outcomes: dict[Mutant, str] = {}
    for mutant, killer in _tried(chosen, _Map(), options.jobs):
        outcomes[mutant] = killer
        print(f"{len(outcomes)}/{len(chosen)} {mutant}: {killer or 'LIVES'}", flush=True)
        if options.table is not None:
            options.table.write_text(_table(outcomes, options.table), "utf-8")


def _tried(mutants: Sequence[Mutant], tests: _Map, jobs: int) -> Iterator[tuple[Mutant, str]]:
    """Yield each mutant and the test that killed it, ``""`` if it lives, as they are done.

    Every mutant has a process of its own, a fork of this one, which has imported what takes seconds.
    """
    os.environ.update(TRITON_INTERPRET="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    for name in ("torch.distributed.checkpoint", "torch.distributed.fsdp", "transformers", "triton"):
        import_module(name)
    import_module("torch").set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        free = [_copied(Path(scratch) / str(number)) for number in range(jobs)]
        running: dict[int, tuple[Mutant, Path, float]] = {}
        waiting = list(reversed(mutants))
        while waiting or running:
            while waiting and free:
                mutant, tree = waiting.pop(), free.pop()
                stages = tests.stages_of(mutant)
                sys.stdout.flush()
                pid = os.fork()
                if pid == 0:
                    _try(mutant, tree, stages)
                limit = time.monotonic() + 120 + 5 * sum(tests.seconds[test] for stage in stages for test in stage)
                running[pid] = mutant, tree, limit
            pid, _ = os.waitpid(-1, os.WNOHANG)
            late = [number for number, (_, _, limit) in running.items() if time.monotonic() > limit]
            for number in late:
                with suppress(ProcessLookupError):
                    os.killpg(number, signal.SIGKILL)
            if pid == 0:
                time.sleep(0.05)
                continue
            mutant, tree, limit = running.pop(pid)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # ranks that it left behind
            (tree / "distprune" / mutant.file).write_bytes((ROOT / "distprune" / mutant.file).read_bytes())
            result = tree.with_suffix(".result")
            killer = result.read_text("utf-8") if result.exists() else "a run that hangs or ends"
            result.unlink(missing_ok=True)
            free.append(tree)
            yield mutant, killer


def _copied(tree: Path) -> Path:
    """Return a copy of what git knows of, and what lies beside it, at ``tree``."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    return tree


class _Killer:
    """Keeps the name of the first test that fails."""

    def __init__(self) -> None:
        self.name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = f"import of {report.nodeid}"


def _try(mutant: Mutant, tree: Path, stages: Sequence[Sequence[str]]) -> None:
    """Run tests in the copy at ``tree`` with the fault until one fails, and end the process."""
    code = 1
    try:
        os.setsid()
        log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        (tree / "distprune" / mutant.file).write_bytes(mutant.text(ROOT / "distprune"))
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "distprune")]:
            del sys.modules[name]
        killer = _Killer()
        arguments = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was imported already
        arguments += ["-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
        for stage in stages:
            ended = pytest.main([*arguments, *stage], plugins=[killer])
            if ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and not killer.name:
                killer.name = f"pytest ends with {int(ended)}"
            if killer.name:
                break
        tree.with_suffix(".result").write_text(killer.name, "utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _table(outcomes: dict[Mutant, str], path: Path) -> str:
    """Return the report: by folder, and what lives; what stands behind a survivor in an earlier one stays."""
    before = path.read_text("utf-8").splitlines() if path.exists() else []
    reasons = dict(line[2:].partition(": ")[::2] for line in before if line.startswith("- "))
    num_drawn = Counter(mutant.file.partition("/")[0] for mutant in outcomes)
    num_killed = Counter(mutant.file.partition("/")[0] for mutant, killer in outcomes.items() if killer)
    survivors = sorted((mutant for mutant, killer in outcomes.items() if not killer), key=lambda m: (m.file, m.start))
    lines = [
        "# Mutants",
        "",
        "`python -m tests.try_mutants` made them, and the tests that run by default tried them.",
        "",
        f"{num_killed.total()} of {num_drawn.total()} were killed.",
        "",
        "| folder | drawn | killed |",
        "|---|---|---|",
        *(f"| {folder} | {num} | {num_killed[folder]} |" for folder, num in sorted(num_drawn.items())),
        "",
        "## What lives",
        "",
        *(f"- {mutant}: {reasons.get(str(mutant), '')}".rstrip() for mutant in survivors),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
