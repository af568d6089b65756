"""Smaller models on disk: what stays is what stood there, over any ranks, killed and resumed, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from distprune.jobs import ShrinkJob, run_shrink_job
from distprune.jobs.options import REPORT_NAME
from tests.hf_models import make_model, make_tokenizer
from tests.jobs.jobs_of_a_kind import run_on_rank
from tests.jobs.test_prune import Heard, contents
from tests.small_job import small_shrink_job
from tests.worlds import ProcessPool

SIZES: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="session")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("dense") / "model", max_shard_size="12KB", **SIZES)
    make_tokenizer(folder)
    return folder


@pytest.fixture
def job(dense_folder: Path, text_file: Path, tmp_path: Path) -> ShrinkJob:
    return small_shrink_job(dense_folder, text_file, tmp_path, mlp=0.75, heads=2, layers=3)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def units_of(text: str) -> Iterator[int]:
    for run in text.split(","):
        first, *last = map(int, run.split("-"))
        yield from range(first, (last or [first])[0] + 1)


def sliced(folder: Path, report: dict[str, Any], width: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the Llama in ``folder`` that stay, cut by hand as ``report`` says."""
    tensors = tensors_of(folder)
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for number, block in enumerate(report["removal"]["blocks"]):
        units = {of["kind"]: torch.tensor(list(units_of(of["units"]))) for of in block["kept"]}
        heads = (units["heads"][:, None] * width + torch.arange(width)).flatten()
        for name in (name for name in tensors if name.startswith(f"{block['name']}.")):
            tensor = tensors[name]
            for part, dim, index in (
                ("gate_proj", 0, units["mlp"]),
                ("up_proj", 0, units["mlp"]),
                ("down_proj", 1, units["mlp"]),
                ("q_proj", 0, heads),
                ("o_proj", 1, heads),
            ):
                tensor = tensor.index_select(dim, index) if part in name else tensor
            kept[name.replace(f".{block['index']}.", f".{number}.", 1)] = tensor
    return kept


def test_what_stays_is_what_stood_there(
    pool: ProcessPool, tmp_path: Path, job: ShrinkJob, dense_folder: Path, text_file: Path
) -> None:
    from transformers import AutoModelForCausalLM

    job = dataclasses.replace(job, criterion="magnitude", refit="none", evaluate_on=(str(text_file),))
    job = dataclasses.replace(job, evaluation_length=16, evaluation_tokens=160)
    assert pool.run(2, run_on_rank, job) == ["", ""]
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    removal = report["removal"]
    assert [len(list(units_of(of["units"]))) for block in removal["blocks"] for of in block["kept"]] == [21, 2] * 3
    expected, written = sliced(dense_folder, report, 6), tensors_of(tmp_path / "out")
    assert expected.keys() == written.keys()
    assert all(torch.equal(expected[name], written[name]) for name in expected)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert model.num_parameters() == removal["num_parameters"] < removal["num_parameters_before"]
    assert (model.config.num_hidden_layers, model.config.num_attention_heads, model.config.head_dim) == (3, 2, 6)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, min_new_tokens=4).shape == (1, 6)
    assert report["perplexity_after"].keys() == {str(text_file)}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| left | layers 3 of 4; mlp 21 of 28; heads 2 of 4 |" in card
    assert "distprune shrink model " in card
    assert "--calibration text.txt" in card
    assert "--mlp 0.75 --heads 2 " in card
    assert "sparse" not in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.whole
def test_a_budget_is_divided_once(job: ShrinkJob, tmp_path: Path) -> None:
    """Killed in the trials, and after them: no trial is made again, and the output is that of the sizes found."""
    asked = dataclasses.replace(job, mlp=None, heads=None, layers=None, parameters=0.8)
    whole = dataclasses.replace(asked, output=str(tmp_path / "whole"))
    assert run_on_rank(0, whole) == ""
    removal = json.loads((tmp_path / "whole" / REPORT_NAME).read_text())["removal"]
    assert removal["num_parameters"] <= 0.8 * removal["num_parameters_before"]
    assert {kind for trial in removal["trials"] for kind in trial["sizes"]} == {"mlp", "heads", "kv_groups", "layers"}
    again = dataclasses.replace(asked, resume=True)
    assert run_on_rank(0, asked, "trial-3") == "killed"
    assert run_on_rank(0, again, 0) == "killed"
    heard = Heard()
    run_shrink_job(again, watcher=heard)
    assert not [said for said in heard.said if said.startswith("tried")]
    assert contents(Path(job.output)) == contents(tmp_path / "whole")
    assert json.loads((Path(job.output) / REPORT_NAME).read_text())["removal"]["trials"] == removal["trials"]
    found = dict(part.rsplit(" ", 1) for part in removal["pattern"].split(", "))
    said: dict[str, Any] = {kind: int(size) for kind, size in found.items()}
    explicit = dataclasses.replace(asked, **said, parameters=None, output=str(tmp_path / "explicit"))
    assert run_on_rank(0, explicit) == ""
    assert contents(tmp_path / "explicit").keys() == contents(tmp_path / "whole").keys()
    ours, other = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "explicit")
    assert all(torch.equal(ours[name], other[name]) for name in ours | other)
    card = (tmp_path / "whole" / "README.md").read_text()
    assert f"| tried | {len(removal['trials'])} divisions of the budget |" in card
    assert "--parameters 0.8 " in card


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"mlp": 29}, "29 of the 28 of 'model.layers.0.mlp' cannot stay; possible are 1 to 28"),
        ({"heads": None, "experts": 2}, "no experts to remove"),
        ({"parameters": 0.9, "samples": 1}, "2 of 2 tokens are the least"),
    ],
)
def test_what_is_not_possible_is_refused(job: ShrinkJob, tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        run_shrink_job(dataclasses.replace(job, **asked))
    assert list(tmp_path.iterdir()) == []


def test_experts_that_are_stored_apart(pool: ProcessPool, text_file: Path, tmp_path: Path) -> None:
    """And are one parameter in the model."""
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / "model", "mixtral", max_shard_size="30KB")
    make_tokenizer(folder)
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
    assert sum("block_sparse_moe.experts" in name for name in after) == 3 * 3
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    sizes = ("num_local_experts", "intermediate_size", "num_hidden_layers")
    assert [getattr(model.config, size) for size in sizes] == [3, 24, 1]
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, min_new_tokens=4).shape == (1, 6)
