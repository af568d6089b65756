"""Sparsity and N:M patterns, read off small matrices whose answer is plain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distprune.checkpoint import inspect_directory, stored_slices


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
