"""What is written is the model, byte for byte the same from any number of ranks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from distprune import prune_model
from distprune.checkpoint.hf_directory import open_directory
from distprune.checkpoint.hf_load import load_model
from distprune.checkpoint.hf_save import save, save_model
from tests.hf_models import make_model
from tests.worlds import all_raise, run_threads


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}


def save_on_rank(_: int, folder: Path, target: Path, mesh_shape: tuple[int, ...], prune: bool) -> int:
    """Return how many bytes this rank has written."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    model = load_model(folder, mesh=mesh)
    if prune:
        prune_model(model, 0.4, score="random", seed=3)
    num_bytes = [0]
    save_model(model, open_directory(folder), target, progress=lambda done, _: num_bytes.append(done))
    return num_bytes[-1]


@pytest.mark.parametrize(
    ("architecture", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("mixtral", torch.bfloat16)]
)
@pytest.mark.sampled(1)
def test_bytes_do_not_depend_on_the_layout(tmp_path: Path, architecture: str, dtype: torch.dtype) -> None:
    folder = make_model(tmp_path / "model", architecture, dtype=dtype, max_shard_size="10KB")
    written, target = dict[str, dict[str, torch.Tensor]](), folder
    for prune in (True, False):
        seen = []
        for mesh_shape in ((1,), (2,), (3,), (8,), (2, 2)):
            target = tmp_path / f"{prune} {mesh_shape}"
            target.mkdir()
            num_bytes = run_threads(torch.Size(mesh_shape).numel(), save_on_rank, folder, target, mesh_shape, prune)
            written = {path.name: load_file(path) for path in sorted(target.glob("*.safetensors"))}
            assert sum(num_bytes) == sum(value.nbytes for file in written.values() for value in file.values())
            seen.append(digests(target))
        plain, target = load_model(folder), tmp_path / f"plain {prune}"
        target.mkdir()
        if prune:
            prune_model(plain, 0.4, score="random", seed=3)
        save_model(plain, open_directory(folder), target)
        assert seen == [digests(target)] * 5
    source = {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    assert {name: list(file) for name, file in written.items()} == {name: list(file) for name, file in source.items()}
    assert all(torch.equal(written[name][key], value) for name, file in source.items() for key, value in file.items())
    indices = [json.loads((path / "model.safetensors.index.json").read_text()) for path in (target, folder)]
    assert indices[0]["weight_map"] == indices[1]["weight_map"]
    assert indices[0]["metadata"]["total_size"] == indices[1]["metadata"]["total_size"]


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_columns_cut_by_shards(tmp_path: Path, architecture: str) -> None:
    """Shards of the last dim lie in the file as many short stretches."""
    folder = make_model(tmp_path / "model", architecture)
    target = tmp_path / "out"
    target.mkdir()

    def save(_: int) -> None:
        model = load_model(folder)
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(
            model,
            mesh=mesh,
            shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim > 1 and p.shape[-1] % 2 == 0 else None,
        )
        save_model(model, open_directory(folder), target)

    run_threads(2, save)
    assert digests(target) == digests(folder)


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, partial(torch.compile, backend="eager")])
def test_a_wrapped_model(tmp_path: Path, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    folder, target = make_model(tmp_path / "model"), tmp_path / "out"
    save(wrap(load_model(folder)), target)
    assert digests(target) == digests(folder)


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    model = load_model(make_model(tmp_path / "model"))
    with pytest.raises(TypeError, match="tokenizer takes one of transformers, not 'gpt2'"):
        save(model, tmp_path / "saved", "gpt2", source=tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("rows", [Shard(0), Replicate()])
def test_a_weight_that_the_first_rank_does_not_hold(tmp_path: Path, rows: Placement) -> None:
    folder, target = make_model(tmp_path / "model"), tmp_path / "out"
    target.mkdir()

    def save(rank: int) -> None:
        model, mesh = load_model(folder), DeviceMesh("cpu", [1, 2])
        layer: Any = model.get_submodule("model.layers.1.mlp.up_proj")
        whole = layer.weight.detach()
        local = whole if rows.is_replicate() else whole.tensor_split(2)[max(rank - 1, 0)]
        local = local.clone() if rank else whole.new_empty(0)
        part = DTensor.from_local(local, mesh, [rows], run_check=False, shape=whole.shape, stride=whole.stride())
        layer.weight = torch.nn.Parameter(part)
        save_model(model, open_directory(folder), target)

    run_threads(3, save)
    assert digests(target) == digests(folder)


@pytest.mark.parametrize("wrong", ["differs", "nobody's"])
def test_weights_that_have_no_one_value(tmp_path: Path, wrong: str) -> None:
    folder, target = make_model(tmp_path / "model"), tmp_path / "out"
    target.mkdir()

    def save(rank: int) -> None:
        model, mesh = load_model(folder), DeviceMesh("cpu", [2])
        group = dist.new_group([0, 1])
        layer: Any = model.get_submodule("model.layers.1.mlp.up_proj")
        if wrong == "differs":
            with torch.no_grad():
                layer.weight[0, 0] += rank
        else:
            layer.weight = torch.nn.Parameter(DTensor.from_local(layer.weight.detach(), mesh, run_check=False))
        if rank < 2:
            save_model(model, open_directory(folder), target, group=group)

    for error in run_threads(3, save, catch=True)[:2]:
        assert isinstance(error, ValueError)
        assert {"differs": "hold different", "nobody's": "no rank holds"}[wrong] in str(error)
    assert list(target.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: delattr(layer, "weight"), "the model has no"),
        (lambda layer: layer.register_buffer("weight_mask", torch.ones(2)), "weight_mask"),
        (lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight[:-1])), "in the model"),
    ],
)
def test_a_model_that_is_not_the_sources(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    folder = make_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    model = load_model(folder)
    change(model.get_submodule("model.layers.1.mlp.up_proj"))
    with pytest.raises(ValueError, match=message):
        save_model(model, open_directory(folder), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("what", ["target", "dtypes"])
def test_ranks_that_disagree(tmp_path: Path, what: str) -> None:
    folder = make_model(tmp_path / "model")
    for name in ("0", "1"):
        (tmp_path / name).mkdir()

    def save(rank: int) -> None:
        model = load_model(folder)
        if what == "dtypes" and rank:
            model = model.bfloat16()
        save_model(model, open_directory(folder), tmp_path / (str(rank) if what == "target" else "0"))

    all_raise(2, save, kind=ValueError, match=what)
    assert [*(tmp_path / "0").iterdir(), *(tmp_path / "1").iterdir()] == []


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_modes_are_those_of_the_umask_in_a_directory_as_closed_as_the_source(tmp_path: Path, mask: int) -> None:
    """And the config says the dtype that was written."""
    folder, target = make_model(tmp_path / "model", max_shard_size="10KB"), tmp_path / "out"
    target.mkdir()
    for path in folder.iterdir():
        path.chmod(0o400)  # safetensors writes 0600, whatever the umask
    folder.chmod(0o700)
    before = os.umask(mask)
    try:
        save_model(load_model(folder, dtype=torch.bfloat16), open_directory(folder), target)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in target.iterdir()} == {0o666 & ~mask}
    assert {path.name for path in target.iterdir()} == {path.name for path in folder.iterdir()}
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert {entry.dtype for _, entry in open_directory(target).tensors.values()} == {torch.bfloat16}


# Sizes of a model before and after, and which of its layers are left.
SMALLER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10},
        {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 21},
    ),
    "gpt2": ({"n_layer": 4}, {"n_layer": 2, "n_inner": 33}),
    "bloom": ({"n_layer": 4}, {"n_layer": 2}),
}
KEPT, GONE = (0, 3), re.compile(r"\.[12]\.")


def save_smaller_on_rank(_: int, small: Path, source: Path, target: Path, size: int) -> None:
    model = load_model(small, mesh=init_device_mesh("cpu", (size,)))
    save_model(model, open_directory(source), target, layers=KEPT)


def rename_stored(folder: Path) -> None:
    """Take the prefix from the names in the files, as the hub has GPT-2, and use other names in the config."""
    for path in folder.glob("*.safetensors"):
        tensors = {name.removeprefix("transformer."): value for name, value in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {name.removeprefix("transformer."): file for name, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = config.pop("n_layer")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("architecture", SMALLER)
@pytest.mark.sampled(1)
def test_a_smaller_model_than_its_source(tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM

    before, after = SMALLER[architecture]
    files: dict[str, Any] = {"max_shard_size": "10KB", "tied": architecture != "gpt2"}
    source = make_model(tmp_path / "model", architecture, **files, **before)
    small = make_model(tmp_path / "small", architecture, **files, seed=1, **{**before, **after})
    if architecture != "llama":
        rename_stored(source)
    target, again = tmp_path / "out", tmp_path / "out3"
    for size, folder in ((1, target), (3, again)):
        folder.mkdir()
        run_threads(size, save_smaller_on_rank, small, source, folder, size)
    files_of = {path.name: path.read_bytes() for path in target.iterdir()}
    assert files_of == {path.name: path.read_bytes() for path in again.iterdir()}
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info.values()), info
    expected = AutoModelForCausalLM.from_pretrained(small)
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(model(ids).logits, expected(ids).logits)
    assert model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 15)
    written, stored = open_directory(target), open_directory(source)
    renumbered = {
        re.sub(r"\.3\.", ".1.", name): file for name, (file, _) in stored.tensors.items() if not GONE.search(name)
    }
    assert {name: file.path.name for name, (file, _) in written.tensors.items()} == {
        name: file.path.name for name, file in renumbered.items()
    }
    assert written.index_metadata["total_parameters"] == expected.num_parameters()
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (None, r"the model has no \['model.layers.2.*if layers were removed, say layers="),
        ((0, 1, 2), r"the model has no \['model.layers.2"),
        ((0,), "lacks 9 tensors that the model calls for: missing"),
        ((0, 4), "lacks 9 tensors that the model calls for: missing"),
        ((0, 3), r"down_proj.weight'\], is \[20, 27\] in this Llama.*, and \[20, 28\] in the model of its config"),
    ],
)
def test_a_smaller_model_that_is_not_as_said(tmp_path: Path, layers: tuple[int, ...] | None, message: str) -> None:
    source = open_directory(make_model(tmp_path / "model", num_hidden_layers=4))
    model: Any = load_model(make_model(tmp_path / "small", num_hidden_layers=2, intermediate_size=27))
    model.config.intermediate_size = 28
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=message):
        save_model(model, source, tmp_path / "out", layers=layers)
    assert list((tmp_path / "out").iterdir()) == []
