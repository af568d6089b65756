"""Loaded models compute what plain transformers computes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from distprune import l1_unstructured, load, save, shrink_model
from distprune.checkpoint.hf_load import load_model, mesh_of
from distprune.collectives.communicator import communicator
from distprune.jobs import PruneJob, SampleJob, run_prune_job, run_sample_job
from tests.architectures import samples
from tests.hf_models import ARCHITECTURES, make_model, make_tokenizer
from tests.worlds import ProcessPool, all_raise, run_threads


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(torch.arange(3, 27).view(2, 12)).logits)


def reference_logits(folder: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder))


def logits_of_rank(_: int, folder: Path, mesh_shape: tuple[int, ...]) -> tuple[Any, ...]:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    model = load_model(folder, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names) if mesh_shape else None)
    found = logits(model)
    # By default torch would leave some whole after a forward.
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    return found, whole, model.training


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mesh_shape", [(), (2,), (3,), (2, 2)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.sampled(9)
def test_logits_equal_transformers(tmp_path: Path, architecture: str, mesh_shape: tuple[int, ...], tied: bool) -> None:
    folder = make_model(tmp_path, architecture, tied=tied)
    wanted = reference_logits(folder)
    for found, whole, training in run_threads(torch.Size(mesh_shape).numel(), logits_of_rank, folder, mesh_shape):
        if mesh_shape:
            torch.testing.assert_close(found, wanted)
        else:
            assert torch.equal(found, wanted)
        assert not training
        assert mesh_shape == () or whole == []


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_dtype_is_that_of_the_checkpoint_unless_given(tmp_path: Path, stored: torch.dtype) -> None:
    folder = make_model(tmp_path, dtype=stored)
    assert {parameter.dtype for parameter in load_model(folder).parameters()} == {stored}
    cast = load_model(folder, dtype=torch.float16)
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.float16}
    # Rotary frequencies stay in float32, as transformers keeps them.
    assert cast.get_buffer("model.rotary_emb.inv_freq").dtype is torch.float32


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_ranks_read_only_their_rows(tmp_path: Path, architecture: str) -> None:
    folder = make_model(tmp_path, architecture)
    whole = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())

    def check(rank: int) -> int:
        num_bytes = []
        model = load_model(
            folder, mesh=init_device_mesh("cpu", (3,)), progress=lambda done, total: num_bytes.append((done, total))
        )
        num_elements = 0
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            pieces = whole[name].chunk(3)
            wanted = pieces[rank] if rank < len(pieces) else whole[name][:0]
            assert torch.equal(parameter.to_local(), wanted)
            num_elements += wanted.numel()
        assert num_bytes[-1] == (4 * num_elements, 4 * num_elements)
        return num_elements

    assert sum(run_threads(3, check)) == sum(tensor.numel() for tensor in whole.values())


EXPERT = "model.layers.1.block_sparse_moe.experts"
UP = "model.layers.1.mlp.up_proj.weight"
LAST = [f"{EXPERT}.4.{part}.weight" for part in ("w1", "w2", "w3")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(UP), r"missing.*'model.layers.1.mlp.up_proj"),
        (lambda tensors: tensors.update({"model.layers.7.weight": torch.zeros(2)}), r"unexpected.*layers.7.weight"),
        (
            lambda tensors: tensors.update({UP: tensors[UP][:-1].contiguous()}),
            r"up_proj.weight'\], is \[27, 20\] in .* \[28, 20\] in",
        ),
        (
            lambda tensors: tensors.pop(f"{EXPERT}.3.w1.weight"),
            r"experts.0.w3.weight' \[5, .*'.*0.w1.weight' \[4, 28, 20\] are",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in LAST],
            r"experts.gate_up_proj', .* is \[4, 56, 20\] in",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name and "w3" in name],
            r"tensors of 'model.layers.1.mlp.experts.gate_up_proj' are missing: .*w3.weight",
        ),
        (
            lambda tensors: tensors.update({LAST[1]: tensors[LAST[1]].bfloat16()}),
            rf"'{LAST[1]}' and '{EXPERT}.0.w2.weight' .* as torch.bfloat16 and torch.float32: say which",
        ),
        (
            lambda tensors: tensors.update({f"{EXPERT}.9.w1.weight".replace("1.block", "7.block"): torch.zeros(2)}),
            r"unexpected.*layers.7.block_sparse_moe.experts.9",
        ),
        (
            lambda tensors: tensors.update({"ln_f.weight": tensors["transformer.ln_f.weight"].clone()}),
            r"twice, as 'ln_f.weight' and as 'transformer.ln_f.weight'",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}),
            r"different values.*tie_word_embeddings",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_config(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    is_mixed = "expert" in message or "down_proj" in message
    folder = make_model(tmp_path, "gpt2" if "ln_f" in message else "mixtral" if is_mixed else "llama")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_model(folder)

    all_raise(2, lambda _: load_model(folder, mesh=init_device_mesh("cpu", (2,))), kind=ValueError, match="")


def test_parts_of_one_weight_in_two_dtypes_load_in_a_third(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    tensors[LAST[1]] = tensors[LAST[1]].bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loaded = load_model(folder, dtype=torch.float16).get_parameter("model.layers.1.mlp.experts.down_proj")
    assert torch.equal(loaded[4], tensors[LAST[1]].half())
    assert torch.equal(loaded[3], tensors[LAST[1].replace("4", "3")].half())


def test_generation_config_comes_along(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_new_tokens": 7}))
    model: Any = load_model(folder)
    assert model.generation_config.max_new_tokens == 7


def test_tied_weights_that_are_stored_twice(tmp_path: Path) -> None:
    folder = make_model(tmp_path, tied=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = load_model(folder)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda rank: {"dtype": (torch.float32, None)[rank]}, "ranks were called with different arguments: dtype"),
        (lambda _: {"mesh": init_device_mesh("cpu", (1, 1, 2))}, "not of 3"),
    ],
)
def test_arguments_that_do_not_go_together(
    tmp_path: Path, arguments: Callable[[int], dict[str, Any]], message: str
) -> None:
    folder = make_model(tmp_path)
    all_raise(2, lambda rank: load_model(folder, **arguments(rank)), kind=ValueError, match=message)


def python_on_rank(rank: int, folder: Path) -> torch.Tensor:
    model: Any = load(folder / "model", dtype=torch.float64)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, DTensor) == (torch.distributed.is_initialized())
    assert weight.dtype is torch.float64
    with torch.no_grad():
        weight.mul_(2)  # a weight that is changed is what is saved
    save(model, str(folder / f"out{rank}"), group=None)
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "device='cuda': there are 0 CUDA devices here; say 'cpu'"),
        (torch.device("cuda", 3), "device='cuda:3': there are 0 CUDA devices here; say 'cpu'"),
        ("gpu", "device='gpu' is no device: say 'cpu', or 'cuda'"),
        ("meta", "device='meta': there are 0 META devices here; say 'cpu'"),
        ("mps", "device='mps': there are 0 MPS devices here; say 'cpu'"),
    ],
)
def test_a_device_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device | str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    model = str(make_model(tmp_path / "model"))
    make_tokenizer(tmp_path / "model")
    sampling = SampleJob(model=model, output=str(tmp_path / "words"))
    calls: list[Callable[[], object]] = [
        lambda: load(model, device=device),
        lambda: run_prune_job(PruneJob(model=model, output=str(tmp_path / "out"), sparsity=0.5), device=device),
        lambda: run_sample_job(sampling, device=device),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("dtype", ["half-precision", torch.int8])
def test_a_dtype_that_is_none(tmp_path: Path, dtype: Any) -> None:
    model = str(make_model(tmp_path / "model"))
    with pytest.raises(TypeError, match="dtype takes a floating-point"):
        load(model, dtype=dtype)
    assert next(load(model, dtype="float64").parameters()).dtype is torch.float64
    assert next(load(model, dtype="auto").parameters()).dtype is next(load(model).parameters()).dtype


def on_some_ranks(rank: int, folder: Path) -> int:
    """Ranks that are not in the group call nothing."""
    if rank == 0:
        with pytest.raises(ValueError, match="3 of 4 ranks: give their group"):
            mesh_of(SimpleNamespace(size=3), torch.device("cpu"))  # type: ignore[arg-type]
    group = torch.distributed.new_group([1, 2])
    if rank not in (1, 2):
        return 0
    weight = next(load(folder, group=communicator(group)).parameters())
    assert isinstance(weight, DTensor)
    return weight.device_mesh.size()


def test_a_communicator_of_some_ranks(pool: ProcessPool, tmp_path: Path) -> None:
    assert pool.run(4, on_some_ranks, make_model(tmp_path / "model")) == [0, 2, 2, 0]


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is loaded by transformers, too."""
    make_model(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    alone = python_on_rank(9, tmp_path)
    found = run_threads(2, lambda _: python_on_rank(0, tmp_path))
    assert all(torch.equal(weight, alone) for weight in found)
    (one, other) = (tmp_path / name / "model.safetensors" for name in ("out9", "out0"))
    assert one.read_bytes() == other.read_bytes()
    assert (tmp_path / "out9" / "tokenizer.json").exists()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out0")
    assert torch.equal(theirs.model.layers[0].mlp.up_proj.weight, alone.to(theirs.dtype))
    save(theirs, tmp_path / "theirs", AutoTokenizer.from_pretrained(tmp_path / "model"))
    assert (tmp_path / "theirs" / "tokenizer.json").exists()
    shrunk = shrink_model(theirs, samples(4) % 67, layers=1)
    save(theirs, tmp_path / "theirs", layers=shrunk.layers, overwrite=True)
    assert len(load(tmp_path / "theirs").model.layers) == 1  # type: ignore[arg-type, union-attr]
    with pytest.raises(FileExistsError, match="not empty"):
        save(theirs, tmp_path / "theirs", layers=shrunk.layers)
    with pytest.raises(ValueError, match="lie inside each other"):
        save(theirs, tmp_path / "out0", layers=shrunk.layers, overwrite=True)
    with pytest.raises(ValueError, match="where this Linear was loaded from is not known: say source="):
        save(torch.nn.Linear(2, 2), tmp_path / "linear")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        for call in (lambda: load(tmp_path / "model"), lambda: save(theirs, tmp_path / "other")):
            with pytest.raises(ImportError, match=r"pip install 'distprune\[hf\]'"):
                call()
    l1_unstructured(theirs.model.layers[0].mlp.up_proj, "weight", 0.5)
    with pytest.raises(ValueError, match=r"up_proj\.weight_orig' has a mask beside it"):
        save(theirs, tmp_path / "masked")
    with pytest.raises(FileNotFoundError, match="there is no model directory"):
        load(tmp_path / "nothing")
