"""Checkpoints whose tensors are not called as the model calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from distprune.checkpoint.hf_directory import open_directory
from distprune.checkpoint.hf_load import load_model
from distprune.checkpoint.hf_save import save_model
from tests.checkpoint.test_hf_load import logits, reference_logits
from tests.checkpoint.test_hf_save import digests
from tests.families import family_model
from tests.hf_models import make_model
from tests.worlds import all_raise, run_threads


def strip_prefix(folder: Path, **more: torch.Tensor) -> Path:
    """Name the tensors as the hub's older checkpoints do."""
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, **more}, path, {"format": "pt"})
    return folder


def load_over(_: int, num_ranks: int, folder: Path) -> Any:
    return load_model(folder, mesh=init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None)


def load_and_save(folder: Path, target: Path, num_ranks: int) -> None:
    target.mkdir()
    run_threads(num_ranks, lambda rank: save_model(load_over(rank, num_ranks, folder), open_directory(folder), target))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "gpt_neox"])
@pytest.mark.sampled(3)
def test_other_names_round_trip(tmp_path: Path, architecture: str, num_ranks: int) -> None:
    folder = make_model(tmp_path / "model", architecture, tied=architecture != "gpt_neox")
    if architecture != "gpt_neox":
        strip_prefix(folder)
    assert torch.equal(logits(load_model(folder)), reference_logits(folder))
    load_and_save(folder, tmp_path / "out", num_ranks)
    assert digests(tmp_path / "out") == digests(folder)


def test_tensors_that_transformers_leaves_out(tmp_path: Path) -> None:
    mask = torch.ones(64, 64, dtype=torch.bool).tril().view(1, 1, 64, 64)
    folder = strip_prefix(make_model(tmp_path / "model", "gpt2"), **{"h.0.attn.bias": mask})
    assert torch.equal(logits(load_model(folder)), reference_logits(folder))
    load_and_save(folder, tmp_path / "out", 2)
    assert torch.equal(reference_logits(tmp_path / "out"), reference_logits(folder))


def test_buffers_that_were_stored_once(tmp_path: Path) -> None:
    """As in checkpoints of Llama 2 and of Pythia."""
    folder = make_model(tmp_path / "model", "llama")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, path, {"format": "pt"})
    assert torch.equal(logits(load_model(folder)), reference_logits(folder))
    load_and_save(folder, tmp_path / "out", 2)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()
    save_file({**tensors, "model.layers.0.self_attn.freq": torch.ones(4)}, path, {"format": "pt"})
    with pytest.raises(ValueError, match="1 tensors that are unexpected"):
        load_model(folder)


def test_experts_that_transformers_leaves_out(tmp_path: Path) -> None:
    """Layers beside the model, which predict more tokens; their experts are stored apart, too."""
    model: Any = family_model("deepseek_v3")
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    more = {f"model.layers.61.mlp.experts.{number}.up_proj.weight": torch.ones(16, 32) for number in range(4)}
    save_file({**tensors, **more}, path, {"format": "pt"})
    load_and_save(tmp_path / "model", tmp_path / "out", 2)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == tensors.keys()


# Experts apart, with shared and dense ones beside them; three matrices in one; and one that is several in the model.
IN_ANOTHER_FORM = ("qwen2_moe", "deepseek_v3", "nemotron_h", "olmo_hybrid", "hrm_text")


@pytest.mark.parametrize("family", IN_ANOTHER_FORM)
@pytest.mark.sampled(2)
def test_what_transformers_converts_round_trips(tmp_path: Path, family: str) -> None:
    model: Any = family_model(family)
    model.save_pretrained(tmp_path / "model")
    source = load_file(tmp_path / "model" / "model.safetensors")
    assert source.keys() - model.state_dict().keys()
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    torch.testing.assert_close(load_model(tmp_path / "model").state_dict(), wanted, rtol=0, atol=0)
    load_and_save(tmp_path / "model", tmp_path / "out", 3)
    assert digests(tmp_path / "out") == digests(tmp_path / "model")


def test_what_is_more_than_placed_is_refused(tmp_path: Path) -> None:
    model: Any = family_model("inkling2_text")
    model.save_pretrained(tmp_path)

    match = "'model.llm.layers.0.mlp.experts.w13_weight' is stored in another form.*Interleave"
    all_raise(2, load_over, 2, tmp_path, kind=NotImplementedError, match=match)
