"""Stored tensors that are regions of the model's: what is left of them in a smaller model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from distprune.checkpoint.hf_directory import open_directory
from distprune.checkpoint.hf_load import load_model
from distprune.checkpoint.hf_save import save_model
from distprune.checkpoint.regions import Region, Shape, fitted
from distprune.removal.rebuild import remove_layers, remove_units
from distprune.shards.geometry import Geometry
from distprune.shards.layouts import local_shard
from tests.checkpoint.test_hf_save import digests
from tests.removal.sliced import SCRIPTS, Script, kept_units, sliced
from tests.worlds import run_threads

_UNITS = SCRIPTS["mixtral"].units
SMALLER = {
    "mixtral": SCRIPTS["mixtral"],
    "qwen2_moe": SCRIPTS["qwen2_moe"],
    "experts alone": dataclasses.replace(
        SCRIPTS["mixtral"],
        units={p: (num, groups, of if p[0] == "experts" else num // groups) for p, (num, groups, of) in _UNITS.items()},
        config={"num_local_experts": 3},
    ),
}


def save_smaller(_: int, folder: Path, target: Path, script: Script, layers: list[int]) -> None:
    model = load_model(folder, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    remove_units(model, kept_units(script, 2))
    remove_layers(model, layers)
    save_model(model, open_directory(folder), target, layers=layers)


@pytest.mark.parametrize(("name", "layers"), [("mixtral", [1]), ("qwen2_moe", [0, 1]), ("experts alone", [0, 1])])
@pytest.mark.sampled(1)
def test_a_smaller_model_is_stored_as_the_source_is(tmp_path: Path, name: str, layers: list[int]) -> None:
    """Experts leave, and channels of those that stay, which are numbered anew."""
    from transformers import AutoModelForCausalLM

    script = SMALLER[name]
    model: Any = script.make()
    model.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    small: Any = sliced(script, kept_units(script, 2), model)
    small.save_pretrained(tmp_path / "small")
    expected = {
        name.replace(f"layers.{layers[0]}", "layers.0"): tensor
        for name, tensor in load_file(tmp_path / "small" / "model.safetensors").items()
        if ".layers." not in name or int(name.split(".")[2]) in layers
    }
    assert any(".experts.2." in name for name in expected) or layers == [1]
    seen = []
    for num_ranks in (1, 2, 3):
        target = tmp_path / str(num_ranks)
        target.mkdir()
        run_threads(num_ranks, save_smaller, tmp_path / "model", target, script, layers)
        seen.append(digests(target))
        written = {name: t for path in target.glob("*.safetensors") for name, t in load_file(path).items()}
        assert written.keys() == expected.keys()
        assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert seen == [seen[0]] * 3
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "2", output_loading_info=True)
    assert not any(info.values()), info
    if len(layers) == 2:
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in small.state_dict().items())


# Two experts of two matrices each, side by side; a line of unequal parts; and a matrix that is two in the model.
REGIONS = {
    **{
        f"{part}.{expert}": [
            Region(f"{part}.{expert}", "experts", ((expert, expert + 1), rows, (0, 5)), (1, 2), (0, 0))
        ]
        for expert in range(2)
        for part, rows in (("w1", (0, 4)), ("w3", (4, 8)))
    },
    "q": [Region("q", "line", ((0, 6),), (0,), (0,))],
    "k": [Region("k", "line", ((6, 8),), (0,), (0,))],
    "both": [
        Region("both", "gate", ((0, 4), (0, 3)), (1, 0), (0, 0)),
        Region("both", "up", ((0, 6), (0, 3)), (1, 0), (0, 4)),
    ],
}
SHAPES: dict[str, Shape] = {"experts": (2, 8, 5), "line": (8,), "gate": (4, 3), "up": (6, 3)}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"experts": (1, 6, 4)}, {"w1.0": (3, 4), "w3.0": (3, 4), "w1.1": None, "w3.1": None}),
        ({"gate": (3, 3), "up": (2, 3)}, {"both": (3, 5)}),
    ],
)
def test_shapes_that_are_left(changed: dict[str, Shape], expected: dict[str, Shape | None]) -> None:
    before: dict[str, Shape | None] = {f"{part}.{expert}": (4, 5) for expert in range(2) for part in ("w1", "w3")}
    before |= {"q": (6,), "k": (2,), "both": (3, 10)}
    left = {stored: shape for stored, shape in {**before, **expected}.items() if shape is not None}
    assert fitted(REGIONS, {**SHAPES, **changed}) == left
    with pytest.raises(NotImplementedError, match=r"'line' is stored in 2 parts, 'q' among them, .* where dim 0 is 4"):
        fitted(REGIONS, {**SHAPES, "line": (4,)})


@pytest.mark.parametrize("region", [Region.whole("s", "s", ()), *REGIONS["both"], *REGIONS["w3.1"]], ids=str)
def test_a_part_of_a_shard_is_a_view_of_it(region: Region) -> None:
    shape = tuple(stop + 1 for _, stop in region.bounds)
    tensor = torch.arange(math.prod(shape)).view(shape)
    box = tensor[tuple(slice(*of_dim) for of_dim in region.bounds)]
    stored_shape = tuple(stop for _, stop in region.stored_bounds)
    part = region.part_of(local_shard("p", tensor), stored_shape)
    assert part.geometry == Geometry(stored_shape, tuple((bounds,) for bounds in region.stored_bounds))
    stored = torch.zeros(stored_shape, dtype=tensor.dtype)
    stored[tuple(slice(*of_dim) for of_dim in region.stored_bounds)] = part.local
    assert torch.equal(region.view_of(stored), box)
    part.local.zero_()
    assert not box.any()
    assert tensor.any() or not shape
