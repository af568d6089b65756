"""What a rank reads of a stored tensor is its own part, whatever runs that has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from distprune.checkpoint import stored_slices
from distprune.checkpoint.weight_file import read_weight_file
from distprune.shards.geometry import Geometry, Runs
from distprune.shards.local_shard import LocalShard, Ownership


@pytest.mark.parametrize("copy_bytes", [stored_slices._COPY_BYTES, 64])
@pytest.mark.parametrize(
    "runs",
    [
        (((2, 5),), ((0, 8),)),
        (((0, 2), (4, 6)), ((3, 8),)),
        (((1, 6),), ((0, 2), (4, 6))),  # as a tensor-parallel row shard that FSDP2 shards along dim 1 again
        (((0, 1), (5, 6)), ((2, 3), (5, 8))),
    ],
)
def test_runs_are_read_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: tuple[Runs, ...], copy_bytes: int
) -> None:
    monkeypatch.setattr(stored_slices, "_COPY_BYTES", copy_bytes)
    stored = torch.arange(48.0).view(6, 8)
    save_file({"w": stored}, tmp_path / "model.safetensors")
    file = read_weight_file(tmp_path / "model.safetensors")
    rows, columns = ([index for run in of_dim for index in range(*run)] for of_dim in runs)
    wanted = stored[rows][:, columns]
    shard = LocalShard("w", torch.zeros_like(wanted), Geometry((6, 8), runs), Ownership())
    stored_slices.fill_shards([(shard, file, file.tensors[0])])
    assert torch.equal(shard.local, wanted)
