"""The one-shot job: exact patterns on disk, and a job that was killed ends with the bytes of one that was not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from distprune import Block, NByM, PerRow, Unstructured
from distprune.checkpoint import stored_slices
from distprune.checkpoint.inspect import inspect_directory
from distprune.jobs import OneShotJob, run_one_shot_job
from distprune.jobs.options import REPORT_NAME
from tests.small_job import small_job


@pytest.fixture
def job(model_folder: Path, text_file: Path, tmp_path: Path) -> OneShotJob:
    return dataclasses.replace(small_job(model_folder, text_file, tmp_path), samples=5, sequence_length=24)


def test_every_tensor_is_written_once(job: OneShotJob, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(stored_slices, "write_chunk", lambda _, __, values, ___: written.append(values.nbytes))
    run_one_shot_job(job)
    assert sum(written) == sum(tensor.nbytes for tensor in load_file(Path(job.model) / "model.safetensors").values())


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "admm", "magnitude", "random"])
@pytest.mark.parametrize("pattern", [Unstructured(0.5), PerRow(0.25), NByM(2, 4)], ids=repr)
@pytest.mark.sampled(3)
def test_patterns_on_disk(job: OneShotJob, method: Any, pattern: Any) -> None:
    report = run_one_shot_job(dataclasses.replace(job, method=method, pattern=pattern))
    inspected = inspect_directory(job.output)
    blocks = [tensor for tensor in inspected.tensors if "layers" in tensor.name and len(tensor.shape) == 2]
    assert len(blocks) == 14
    if isinstance(pattern, NByM):
        assert all("2:4" in tensor.patterns for tensor in blocks)
    linears = {of_layer["name"]: of_layer for block in report.work.blocks for of_layer in block["layers"]}
    for tensor in blocks:
        assert linears[tensor.name.removesuffix(".weight")]["num_zeros"] == tensor.num_zeros
    assert json.loads((Path(job.output) / REPORT_NAME).read_text())["pruning"]["method"] == method


@pytest.mark.parametrize(
    ("method", "pattern", "allocation", "by"),
    [
        ("admm", Unstructured(0.3), None, "gradients"),
        ("admm", Unstructured(0.6), "uniform", "uniform"),
        ("wanda", PerRow(0.7), None, "uniform"),  # as the paper has it
        ("wanda", Unstructured(0.7), "gradients", "gradients"),
        ("sparsegpt", Unstructured(0.5), None, "uniform"),
        pytest.param(  # blocks compete over all rows
            *("admm", Block(4, 0.5), None, "uniform"),
            marks=pytest.mark.filterwarnings("ignore:.*stay dense. block.4 does not fit its 10 outputs:UserWarning"),
        ),
        ("wanda", NByM(2, 4), None, "uniform"),
    ],
)
@pytest.mark.sampled(2)
def test_shares(job: OneShotJob, method: Any, pattern: Any, allocation: Any, by: str) -> None:
    report = run_one_shot_job(dataclasses.replace(job, method=method, pattern=pattern, allocation=allocation))
    assert report.work.allocation == by
    assert "0.weight" not in report.work.pattern  # as asked for
    linears = [of_layer for block in report.work.blocks for of_layer in block["layers"]]
    shares = [of_layer["num_pruned"] / of_layer["num_elements"] for of_layer in linears]
    assert f"| allocation | {by} |" in (Path(job.output) / "README.md").read_text()
    if by == "uniform":
        assert max(shares) - min(shares) < 0.05  # whole weights of a row
        return
    assert max(shares) - min(shares) > 0.1
    total = round(pattern.sparsity * sum(of_layer["num_elements"] for of_layer in linears))
    assert abs(sum(of_layer["num_pruned"] for of_layer in linears) - total) <= 5
