"""Sparsity and N:M patterns, read off small matrices whose answer is plain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import distprune as prune
from distprune.checkpoint import stored_slices
from distprune.checkpoint.inspect import inspect_directory
from tests.families import family_model


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("copy_bytes", [stored_slices._COPY_BYTES, 64])
def test_counts_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy_bytes: int) -> None:
    monkeypatch.setattr(stored_slices, "_COPY_BYTES", copy_bytes)
    ones = torch.ones(6, 8)
    two_of_four = ones * torch.tensor([1.0, 0, 0, 1, -0.0, 2, 3, 0])
    four_of_eight = ones * torch.tensor([1.0, 1, 1, 0, 0, 0, 0, 1])
    one_of_four = ones * torch.tensor([0.0, 0, 0, 1, 0, 5, 0, 0])
    broken = two_of_four.clone()
    broken[5, 1] = 1
    tensors = {
        "broken": broken,
        "dense": ones,
        "four_of_eight": four_of_eight,
        "one_of_four": one_of_four,
        "scalar": torch.tensor(0.0),
        "two_of_four": two_of_four.bfloat16(),
        "vector": torch.zeros(5),
        "width6": torch.zeros(2, 6),
    }
    report = inspect_directory(write(tmp_path, tensors))
    found = {tensor.name: (tensor.num_zeros, tensor.patterns) for tensor in report.tensors}
    assert found == {
        "broken": (23, ()),
        "dense": (0, ()),
        "four_of_eight": (24, ("4:8",)),
        "one_of_four": (36, ("1:4", "2:4", "4:8")),
        "scalar": (1, ()),
        "two_of_four": (24, ("2:4", "4:8")),
        "vector": (5, ()),
        "width6": (12, ()),
    }
    assert report.num_zeros == sum(int((tensor == 0).sum()) for tensor in tensors.values())
    assert json.loads(json.dumps(report.to_dict()))["num_zeros"] == report.num_zeros


@pytest.mark.parametrize("copy_bytes", [stored_slices._COPY_BYTES, 3 * 4 * 16])
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "mixtral"])
def test_patterns_run_along_the_inputs_however_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, copy_bytes: int
) -> None:
    """GPT-2 keeps its matrices (in, out), GPT-OSS its experts (expert, in, out), Mixtral one matrix an expert."""
    monkeypatch.setattr(stored_slices, "_COPY_BYTES", copy_bytes)
    model: Any = family_model(name)
    prune.prune_model(model, pattern="2:4")
    model.save_pretrained(tmp_path)
    report = inspect_directory(tmp_path)
    pruned = [tensor for tensor in report.tensors if tensor.is_prunable]
    assert len(pruned) > 4
    assert {tensor.name for tensor in pruned if "2:4" not in tensor.patterns} == set()
    assert not any(tensor.patterns for tensor in report.tensors if not tensor.is_prunable)
