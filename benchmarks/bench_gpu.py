"""What distprune does on a GPU: tests, then what calls take; each part is a process of its own, with a time limit.

    bash benchmarks/gpu.sh [--small] [--limit SECONDS] [--output FILE] [PART ...]

Results are printed as they come, and written to ``benchmarks/results/gpu_<name>_<date>.md``. ``--small`` runs all of it
on the CPU, kernels in Triton's interpreter: to see that it runs.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PARTS = {"tests": 130, "selection": 80, "training": 50, "one_shot": 80, "two_four": 30, "demo": 130}  # by importance


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit", type=float, default=470, help="seconds of all parts; 470 by default")
    parser.add_argument("--output", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    args = parser.parse_args(arguments)
    if unknown := set(args.parts).difference(PARTS):
        parser.error(f"there is no part {', '.join(unknown)}; those are {', '.join(PARTS)}")
    if find_spec("numpy") is None:
        print("distprune needs numpy, which is missing here.")
        return 1
    if not args.small and not torch.cuda.is_available():
        print("There is no GPU here. --small runs all of it on the CPU.")
        return 1
    name = "small" if args.small else re.sub(r"\W+", "-", torch.cuda.get_device_name().lower())
    output = args.output or ROOT / f"benchmarks/results/gpu_{name}_{datetime.date.today()}.md"
    text, end, num_failed = _heading(name), time.perf_counter() + args.limit, 0
    print(text, flush=True)
    for part in args.parts or PARTS:
        lines, failure = _run(part, args.small, min(PARTS[part], end - time.perf_counter()))
        num_failed += failure is not None
        text += "\n".join(["", *lines, *([] if failure is None else ["", f"{part}: {failure}"])]) + "\n"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, "utf-8")  # so that a run that is cut off leaves what it has
    print(f"\nwritten to {output}")
    return min(num_failed, 1)


def _heading(name: str) -> str:
    if name == "small":
        gpu = "none: small, on the CPU, kernels in Triton's interpreter"
    else:
        there = torch.cuda.get_device_properties(0)
        gpu = f"{there.name} ({there.multi_processor_count} multiprocessors, {there.total_memory / 2**30:.0f} GiB)"
    versions = ", ".join(
        f"{package} {_version(package)}" for package in ("distprune", "torch", "triton", "transformers")
    )
    lines = [
        f"- Date: {datetime.date.today()}",
        f"- Hardware: {gpu}, {os.cpu_count()} CPU cores; one process",
        f"- Versions: Python {platform.python_version()}, {versions}",
        f"- Command: `{' '.join(['bash benchmarks/gpu.sh', *sys.argv[1:]])}`",
    ]
    return "\n".join(["# distprune on a GPU", "", *lines, ""])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        if package != "distprune":
            return "missing"
        match = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
        return f"{match[1] if match else ''}, from its sources"


def _run(part: str, is_small: bool, limit: float) -> tuple[list[str], str | None]:
    """Run ``part``, and print what it does; return its lines, and what went wrong."""
    if limit < 10:
        return _left_out(part, "there is no time left")
    command = [sys.executable, "-m", "benchmarks.gpu_parts", part, *(["--small"] if is_small else [])]
    if part == "tests":
        if missing := [package for package in ("pytest", "hypothesis", "allpairspy") if find_spec(package) is None]:
            return _left_out(part, f"needs {', '.join(missing)}")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu"]
        command += ["-n", "8"] if find_spec("xdist") is not None and not is_small else ["-p", "no:xdist"]
        files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
        command += ["-p", "no:benchmark", *(str(path.relative_to(ROOT)) for path in files)]
    started, is_over = time.perf_counter(), threading.Event()
    env = {**os.environ, **({"TRITON_INTERPRET": "1"} if is_small else {})}
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:

        def stop() -> None:
            is_over.set()
            run.kill()

        timer = threading.Timer(limit, stop)
        timer.start()
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        code = run.wait()
        timer.cancel()
    print(f"({part}: {time.perf_counter() - started:.0f} s)", flush=True)
    failure = f"stopped after {limit:.0f} s" if is_over.is_set() else None
    if part == "tests":
        return ["## Tests\n", *_tests(lines)], failure or (f"exit code {code}" if code not in (0, 5) else None)
    report = [line[2:] for line in lines if line == ">" or line.startswith("> ")]
    return report, failure or (f"FAILED: {lines[-1] if lines else code}" if code else None)


def _left_out(part: str, why: str) -> tuple[list[str], None]:
    print(f"{part}: left out, {why}", flush=True)
    return [f"{part}: left out, {why}"], None


def _tests(lines: Sequence[str]) -> list[str]:
    """Return how many tests passed, and the first that did not."""
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return [*(line for line in lines[-1:] if " in " in line), *(f"- {line[:150]}" for line in failed[:5])]


if __name__ == "__main__":
    sys.exit(main())
