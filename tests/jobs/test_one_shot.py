"""The one-shot job: exact patterns on disk; what is wrong is an error on every rank, and nothing is written."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from distprune import Block, NByM, PerRow, Unstructured
from distprune.checkpoint import stored_slices
from distprune.checkpoint.inspect import inspect_directory
from distprune.jobs import OneShotJob, run_one_shot_job
from tests.jobs.jobs_of_a_kind import run_on_rank
from tests.worlds import ProcessPool


def test_every_tensor_is_written_once(job: OneShotJob, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    monkeypatch.setattr(stored_slices, "write_chunk", lambda _, __, values, ___: written.append(values.nbytes))
    run_one_shot_job(job)
    assert sum(written) == sum(tensor.nbytes for tensor in load_file(Path(job.model) / "model.safetensors").values())


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
    zeros = {tensor.name: tensor.num_zeros for tensor in inspect_directory(job.output).tensors}
    assert [zeros[f"{of_layer['name']}.weight"] for of_layer in linears] == [of["num_zeros"] for of in linears]
    assert len(linears) == (10 if isinstance(pattern, Block) else 14)
    shares = [of_layer["num_pruned"] / of_layer["num_elements"] for of_layer in linears]
    assert f"| allocation | {by} |" in (Path(job.output) / "README.md").read_text()
    if by == "uniform":
        assert max(shares) - min(shares) < 0.05  # whole weights of a row
        return
    assert max(shares) - min(shares) > 0.1
    total = round(pattern.sparsity * sum(of_layer["num_elements"] for of_layer in linears))
    assert abs(sum(of_layer["num_pruned"] for of_layer in linears) - total) <= 5


def test_a_model_without_a_tokenizer(pool: ProcessPool, job: OneShotJob) -> None:
    for path in Path(job.model).glob("tokenizer*"):
        path.unlink()
    pool.all_say(2, run_on_rank, job, match="^ValueError: .*holds no tokenizer that transformers can load")
    assert not list(Path(job.output).parent.glob("*"))


def test_activations_that_are_no_numbers(pool: ProcessPool, job: OneShotJob) -> None:
    before = Path(shutil.copytree(job.model, f"{job.model} before"))
    path = Path(job.model) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.post_attention_layernorm.weight"][3] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    match = "^ValueError: block 'model.layers.1': NaN or Inf in the inputs of 'mlp.gate_proj'"
    pool.all_say(2, run_on_rank, job, match=match)
    assert os.listdir(Path(job.output).parent) == []  # the first block was written
    run_one_shot_job(dataclasses.replace(job, model=str(before)))  # so the mended job starts
