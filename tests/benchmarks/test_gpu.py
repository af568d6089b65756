"""The benchmark for GPUs runs, small, where there is none, so that it does when there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_gpu
from benchmarks.gpu_parts import CALLS

pytest.importorskip("triton")
pytest.importorskip("transformers")


def test_it_runs_small_on_the_cpu(tmp_path: Path) -> None:
    command = ["bash", str(bench_gpu.ROOT / "benchmarks/gpu.sh"), "--small", "--output", str(tmp_path / "report.md")]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stdout + done.stderr
    report = (tmp_path / "report.md").read_text()
    assert not any(word in report for word in ("FAILED", "stopped", "left out"))
    assert all(f"| `{call}` |" in report for call in CALLS)
    assert report.count("\n## ") == len(bench_gpu.PARTS)
    assert len(report.splitlines()) <= 60


def test_what_fails_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, failure = bench_gpu._run("none", True, 60)
    assert lines == []
    assert failure is not None
    assert "KeyError: 'none'" in failure
    monkeypatch.setattr(bench_gpu, "find_spec", lambda _: None)
    assert bench_gpu._run("tests", True, 60) == (["tests: left out, needs pytest, hypothesis, allpairspy"], None)
    assert bench_gpu._run("selection", True, 5) == (["selection: left out, there is no time left"], None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main([]) == 1
    assert "no GPU" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_gpu.main(["--small", "speed"])
    assert "there is no part speed; those are tests, selection" in capsys.readouterr().err
