"""Loaded models compute what plain transformers computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distprune.checkpoint import load_model
from tests.hf_models import ARCHITECTURES, make_model
from tests.worlds import ProcessPool, run_threads


def reference_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return torch.as_tensor(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits)


def logits_of_rank(_: int, folder: Path, tokens: torch.Tensor, mesh_shape: tuple[int, ...]) -> tuple[Any, ...]:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    model = load_model(folder, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    with torch.no_grad():
        logits = model(tokens).logits
    return logits, plain, model.training


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_logits_equal_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = make_model(tmp_path, architecture, tied=tied)
    tokens = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        logits = load_model(folder)(tokens).logits
    assert torch.equal(logits, reference_logits(folder, tokens))


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon"])
def test_sharded_logits_equal_transformers(
    tmp_path: Path, pool: ProcessPool, architecture: str, mesh_shape: tuple[int, ...]
) -> None:
    folder = make_model(tmp_path, architecture)
    tokens = torch.arange(3, 27).view(2, 12)
    wanted = reference_logits(folder, tokens)
    for logits, plain, training in pool.run(torch.Size(mesh_shape).numel(), logits_of_rank, folder, tokens, mesh_shape):
        torch.testing.assert_close(logits, wanted)
        assert plain == []
        assert not training


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtype_is_that_of_the_checkpoint_unless_given(tmp_path: Path, stored: torch.dtype) -> None:
    folder = make_model(tmp_path, dtype=stored)
    assert {parameter.dtype for parameter in load_model(folder).parameters()} == {stored}
    cast = load_model(folder, dtype=torch.float16)
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.float16}
    # Rotary frequencies stay in float32, as transformers keeps them.
    assert cast.get_buffer("model.rotary_emb.inv_freq").dtype is torch.float32


def test_sharded_over_several_files(tmp_path: Path) -> None:
    folder = make_model(tmp_path, max_shard_size="10KB")
    assert (folder / "model.safetensors.index.json").is_file()
    tokens = torch.arange(3, 15).view(1, 12)
    with torch.no_grad():
        assert torch.equal(load_model(folder)(tokens).logits, reference_logits(folder, tokens))


def test_ranks_read_only_their_rows(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    whole = load_file(folder / "model.safetensors")

    def check(rank: int) -> int:
        model = load_model(folder, mesh=init_device_mesh("cpu", (3,)))
        num_elements = 0
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            pieces = whole[name].chunk(3)
            wanted = pieces[rank] if rank < len(pieces) else whole[name][:0]
            assert torch.equal(parameter.to_local(), wanted)
            num_elements += wanted.numel()
        return num_elements

    assert sum(run_threads(3, check)) == sum(tensor.numel() for tensor in whole.values())


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_weights_that_are_not_those_of_the_config(tmp_path: Path, change: str) -> None:
    folder = make_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors["model.layers.7.weight"] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=change if change != "shape" else "in the model"):
        load_model(folder)

    def load(_: int) -> None:
        load_model(folder, mesh=init_device_mesh("cpu", (2,)))

    for error in run_threads(2, load, catch=True):
        assert isinstance(error, ValueError)


def test_a_buffer_that_nothing_computes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

    folder = make_model(tmp_path)
    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", lambda *_: None)
    with pytest.raises(NotImplementedError, match="inv_freq"):
        load_model(folder)


def test_generation_config_comes_along(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_new_tokens": 7}))
    model: Any = load_model(folder)
    assert model.generation_config.max_new_tokens == 7
    shutil.rmtree(folder)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_are_stored_twice(tmp_path: Path, equal: bool) -> None:
    folder = make_model(tmp_path, tied=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if equal else 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if equal:
        model = load_model(folder)
        assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    else:
        with pytest.raises(ValueError, match=r"different values.*tie_word_embeddings"):
            load_model(folder)


def test_parameters_are_shards_also_after_a_forward(tmp_path: Path) -> None:
    folder = make_model(tmp_path)

    def check(_: int) -> None:
        model = load_model(folder, mesh=init_device_mesh("cpu", (2,)))
        with torch.no_grad():
            model(torch.arange(3, 15).view(1, 12))
        assert [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)] == []

    run_threads(2, check)


def test_ranks_given_different_dtypes(tmp_path: Path) -> None:
    folder = make_model(tmp_path)

    def load(rank: int) -> None:
        load_model(folder, dtype=None if rank else torch.float32)

    for error in run_threads(2, load, catch=True):
        assert isinstance(error, ValueError)
        assert "dtype" in str(error)


def test_mesh_of_three_axes(tmp_path: Path) -> None:
    folder = make_model(tmp_path)

    def load(_: int) -> None:
        load_model(folder, mesh=init_device_mesh("cpu", (1, 1, 2)))

    for error in run_threads(2, load, catch=True):
        assert isinstance(error, ValueError)
        assert "not of 3" in str(error)
