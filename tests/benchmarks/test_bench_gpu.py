"""The benchmark for GPUs runs, small, where there is none, so that it does when there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import bench_gpu


@pytest.mark.whole
def test_it_runs_small_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--device", "cpu", "--output", str(report)])
    bench_gpu.main()
    text = report.read_text()
    assert "DIFFERENT" not in text
    assert text.count("| equal |") == 2 * len(bench_gpu.METHODS)
    assert "prune_model" in text
    assert "| sparsegpt | 2:4 |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu"])
    bench_gpu.main()
    assert "no GPU" in capsys.readouterr().out
