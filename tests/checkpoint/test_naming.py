"""Checkpoints whose tensors are not called as the model calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from distprune.checkpoint import load_model, open_directory, save_model
from tests.hf_models import make_model
from tests.worlds import run_threads


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(torch.arange(3, 27).view(2, 12)).logits)


def reference_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(folder))


def strip_prefix(folder: Path, **more: torch.Tensor) -> Path:
    """Name the tensors as the hub's older checkpoints do."""
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, **more}, path, {"format": "pt"})
    return folder


def load_and_save(folder: Path, target: Path, num_ranks: int) -> None:
    target.mkdir()

    def one(_: int) -> None:
        mesh = init_device_mesh("cpu", (num_ranks,)) if num_ranks > 1 else None
        save_model(load_model(folder, mesh=mesh), open_directory(folder), target)

    run_threads(num_ranks, one)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "gpt_neox"])
def test_other_names_round_trip(tmp_path: Path, architecture: str, num_ranks: int) -> None:
    folder = make_model(tmp_path / "model", architecture, tied=architecture != "gpt_neox")
    if architecture != "gpt_neox":
        strip_prefix(folder)
    assert torch.equal(logits(load_model(folder)), reference_logits(folder))
    load_and_save(folder, tmp_path / "out", num_ranks)
    saved, source = (load_file(path / "model.safetensors") for path in (tmp_path / "out", folder))
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], source[name]) for name in source)


def test_tensors_that_transformers_leaves_out(tmp_path: Path) -> None:
    mask = torch.ones(64, 64, dtype=torch.bool).tril().view(1, 1, 64, 64)
    folder = strip_prefix(make_model(tmp_path / "model", "gpt2"), **{"h.0.attn.bias": mask})
    assert torch.equal(logits(load_model(folder)), reference_logits(folder))
    load_and_save(folder, tmp_path / "out", 2)
    assert torch.equal(reference_logits(tmp_path / "out"), reference_logits(folder))


def test_tensors_in_another_form_are_refused(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="another form"):
        load_model(tmp_path)
