"""Smaller models on disk: what stays is what stood there, over any ranks, killed and resumed, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import distprune as prune
from distprune.calibration.text import tokenize_file
from distprune.checkpoint.hf_load import load_tokenizer
from distprune.evaluation import perplexities
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


# By model: what is asked for, the sizes in its configuration afterwards, and what the card says is left.
SMALLER: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "llama": (
        {"mlp": 0.75, "heads": 2, "layers": 3},
        {"num_hidden_layers": 3, "intermediate_size": 21, "num_attention_heads": 2, "head_dim": 6},
        "layers 3 of 4; mlp 21 of 28; heads 2 of 4",
    ),
    "mixtral": (  # experts are stored apart, and one parameter in the model
        {"experts": 3, "mlp": 24, "layers": 1},
        {"num_hidden_layers": 1, "intermediate_size": 24, "num_local_experts": 3},
        "layers 1 of 2; experts 3 of 5; mlp 24 of 28",
    ),
}


@pytest.mark.parametrize("architecture", SMALLER)
def test_what_is_written_is_what_shrink_model_leaves(
    pool: ProcessPool, text_file: Path, tmp_path: Path, dense_folder: Path, architecture: str
) -> None:
    """On one process, where the job is two ranks that were killed and resumed."""
    sizes, config, left = SMALLER[architecture]
    folder = dense_folder
    if architecture != "llama":
        folder = make_model(tmp_path / "model", architecture, max_shard_size="30KB")
        make_tokenizer(folder)
    job = small_shrink_job(folder, text_file, tmp_path / "outputs", **sizes, criterion="magnitude", refit="none")
    job = dataclasses.replace(job, evaluate_on=(str(text_file),), evaluation_length=16, evaluation_tokens=160)
    assert pool.run(2, run_on_rank, dataclasses.replace(job, evaluation_length=32), 0) == ["killed", "killed"]
    assert pool.run(2, run_on_rank, dataclasses.replace(job, resume=True)) == ["", ""]
    output = tmp_path / "outputs" / "out"
    whole = prune.load(folder)
    text = tokenize_file(load_tokenizer(folder), str(text_file), max_tokens=160, sequence_length=16)
    (before,) = json.loads((output / REPORT_NAME).read_text())["perplexity_before"].values()
    assert before == pytest.approx(perplexities(whole, [text], sequence_length=16)[0], rel=1e-5)
    windows = prune.calibration_windows(text_file, load_tokenizer(folder), 4, 16)
    prune.shrink_model(whole, windows, **sizes, criterion="magnitude", refit="none", layer_criterion="influence")
    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    ours, wanted = model.state_dict(), whole.state_dict()
    assert all(torch.equal(ours[name], wanted[name]) for name in ours | wanted)
    assert {size: getattr(model.config, size) for size in config} == config
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, min_new_tokens=4).shape == (1, 6)
    report = json.loads((output / REPORT_NAME).read_text())
    assert model.num_parameters() == report["removal"]["num_parameters"] < report["removal"]["num_parameters_before"]
    assert report["perplexity_after"].keys() == {str(text_file)}
    card = (output / "README.md").read_text()
    for said in (f"| left | {left} |", "distprune shrink model ", "--calibration text.txt"):
        assert said in card
    assert all(f"--{kind} {size} " in card for kind, size in sizes.items())
    assert "sparse" not in card
    assert [path.name for path in output.parent.iterdir()] == ["out"]


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


def test_what_transformers_does_not_load_is_said(job: ShrinkJob, tmp_path: Path) -> None:
    """And no word of the block that leaves."""
    make_tokenizer(model := make_model(tmp_path / "model", "gpt2"))
    (path,), heard = model.glob("*.safetensors"), Heard()
    save_file({**load_file(path), "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}, path, {"format": "pt"})
    run_shrink_job(dataclasses.replace(job, model=str(model), heads=None, mlp=None, layers=1), watcher=heard)
    assert "not in the output, since transformers does not load it: 'transformer.h.0.attn.bias'" in heard.said


def test_what_is_not_possible_is_refused(job: ShrinkJob, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 of 2 tokens are the least"):
        run_shrink_job(dataclasses.replace(job, parameters=0.9, samples=1))
    assert list(tmp_path.iterdir()) == []
