"""Every job on a checkpoint whose experts are stored apart, and one parameter in the model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distprune import PerRow
from distprune.jobs import PruneJob
from distprune.jobs.options import REPORT_NAME
from tests.hf_models import make_model, make_tokenizer
from tests.jobs import test_finetune, test_prune
from tests.jobs.jobs_of_a_kind import run_on_rank
from tests.jobs.test_prune import contents
from tests.jobs.test_shrink import tensors_of, units_of
from tests.small_job import small_finetune_job, small_job, small_shrink_job
from tests.worlds import ProcessPool

EXPERTS = "block_sparse_moe.experts"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("mixtral") / "model", "mixtral", max_shard_size="30KB")
    make_tokenizer(folder)
    return folder


def names_of(folder: Path) -> dict[str, list[str]]:
    return {path.name: list(load_file(path)) for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.whole
def test_pruned_and_fine_tuned(pool: ProcessPool, folder: Path, text_file: Path, tmp_path: Path) -> None:
    job = PruneJob(model=str(folder), output=str(tmp_path / "pruned1"), pattern="2:4", evaluate_on=(str(text_file),))
    job = dataclasses.replace(job, evaluation_length=16, evaluation_tokens=160)
    spread = dataclasses.replace(job, output=str(tmp_path / "pruned2"))
    assert pool.run(1, test_prune.run_on_rank, [job]) == [""]
    assert pool.run(2, test_prune.run_on_rank, [spread]) == ["", ""]
    assert contents(tmp_path / "pruned1") == contents(tmp_path / "pruned2")
    pruned = tensors_of(tmp_path / "pruned1")
    assert names_of(tmp_path / "pruned1") == names_of(folder)
    tune = small_finetune_job(tmp_path / "pruned1", text_file, tmp_path, steps=4)
    tune = dataclasses.replace(tune, teacher=str(folder), save_every=2)
    whole = dataclasses.replace(tune, output=str(tmp_path / "whole"))
    losses = pool.run(2, test_finetune.run_on_rank, whole)[0]
    assert len(losses) == 4
    assert pool.run(2, test_finetune.run_on_rank, tune, 4) == ["killed", "killed"]
    assert pool.run(2, test_finetune.run_on_rank, dataclasses.replace(tune, resume=True))[0] == losses
    assert contents(tmp_path / "tuned") == contents(tmp_path / "whole")
    assert names_of(tmp_path / "tuned") == names_of(folder)
    for name, tensor in tensors_of(tmp_path / "tuned").items():
        assert not torch.equal(tensor, pruned[name])
        assert torch.equal(tensor == 0, pruned[name] == 0) or EXPERTS not in name


def test_calibrated(pool: ProcessPool, folder: Path, text_file: Path, tmp_path: Path) -> None:
    job = dataclasses.replace(small_job(folder, text_file, tmp_path), method="wanda", pattern=PerRow(0.5))
    job = dataclasses.replace(job, samples=4, sequence_length=24)
    whole = dataclasses.replace(job, output=str(tmp_path / "whole"))
    assert pool.run(1, run_on_rank, whole) == [""]
    assert pool.run(2, run_on_rank, job, 1) == ["killed"] * 2
    assert pool.run(2, run_on_rank, dataclasses.replace(job, resume=True)) == ["", ""]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert tensors_of(tmp_path / "out").keys() == tensors_of(folder).keys()
    tensors, before = tensors_of(tmp_path / "out"), tensors_of(folder)
    for name in (name for name in tensors if EXPERTS in name):
        assert bool(((tensors[name] == 0).sum(dim=1) >= tensors[name].shape[1] // 2).all()), name
        assert torch.equal(tensors[name], before[name] * (tensors[name] != 0))


def test_made_smaller(pool: ProcessPool, folder: Path, text_file: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    job = small_shrink_job(folder, text_file, tmp_path, experts=3, mlp=24, layers=1)
    job = dataclasses.replace(job, criterion="magnitude", refit="none")
    whole = dataclasses.replace(job, output=str(tmp_path / "whole"))
    assert pool.run(1, run_on_rank, whole) == [""]
    assert pool.run(2, run_on_rank, job, 0) == ["killed", "killed"]
    assert pool.run(2, run_on_rank, dataclasses.replace(job, resume=True)) == ["", ""]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    (block,) = json.loads((tmp_path / "out" / REPORT_NAME).read_text())["removal"]["blocks"]
    kept: dict[str, Any] = {of["place"]: torch.tensor(list(units_of(of["units"]))) for of in block["kept"]}
    before, after = tensors_of(folder), tensors_of(tmp_path / "out")
    old, new = f"{block['name']}.block_sparse_moe", "model.layers.0.block_sparse_moe"
    assert torch.equal(after[f"{new}.gate.weight"], before[f"{old}.gate.weight"][kept["mlp.experts"]])
    for number, expert in enumerate(kept["mlp.experts"].tolist()):
        channels = kept[f"mlp.experts.{expert}"]
        for part, dim in (("w1", 0), ("w2", 1), ("w3", 0)):
            whole_part = before[f"{old}.experts.{expert}.{part}.weight"]
            written = after[f"{new}.experts.{number}.{part}.weight"]
            assert torch.equal(written, whole_part.index_select(dim, channels))
    assert sum(EXPERTS in name for name in after) == 3 * 3
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    sizes = ("num_local_experts", "intermediate_size", "num_hidden_layers")
    assert [getattr(model.config, size) for size in sizes] == [3, 24, 1]
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, min_new_tokens=4).shape == (1, 6)
