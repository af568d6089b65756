"""Adapters that are merged into a base pruned in place leave its zeros: as test_peft.py, without PEFT."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

import distprune as prune
from tests.worlds import ProcessPool
from tests.wrapped import batches, transformer, whole, wrap


class Adapted(nn.Module):
    """A linear layer with a low-rank update, as PEFT's LoRA layers."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)
        nn.init.constant_(self.lora_A.weight, 0.5)
        nn.init.constant_(self.lora_B.weight, 0.25)

    @override
    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class PeftModel(nn.Module):
    def __init__(self, base_model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.base_model, self._names = base_model, names
        for name in names:
            base_model.set_submodule(name, Adapted(base_model.get_submodule(name)))  # type: ignore[arg-type]

    @torch.no_grad()
    def merge_and_unload(self, fails_at: str = "") -> nn.Module:
        for name in self._names:
            if name == fails_at:
                raise RuntimeError("out of memory")
            adapted: Any = self.base_model.get_submodule(name)
            adapted.base_layer.bias.data += 0.5  # as lora_bias=True
            adapted.base_layer.weight.data += adapted.lora_B.weight @ adapted.lora_A.weight
            self.base_model.set_submodule(name, adapted.base_layer)
        return self.base_model


NAMES = ["layers.0.up", "layers.1.up", "layers.1.down"]


def merged_on_rank(_: int, layout: str) -> None:
    base = transformer()
    prune.prune_model(base, 0.6, include="layers.*")
    for name in NAMES:
        nn.init.zeros_(base.get_submodule(name).bias)  # type: ignore[arg-type]
    before = [parameter.detach().clone() for parameter in base.parameters()]
    model = PeftModel(base, NAMES)
    wrapped = wrap(layout, base)
    if layout == "fsdp2":
        wrapped.step(batches(1)[0])  # the root stays gathered
        wrapped.model.zero_grad()
    merged = prune.merge_adapters(model)
    for was, (name, now) in zip(before, merged.named_parameters(), strict=True):
        path, _, kind = name.rpartition(".")
        update: Any = {"weight": 0.25 * (was != 0), "bias": 0.5}[kind] if path in NAMES else 0.0
        assert torch.equal(whole(now), was + update)


def merged_into_masks(_: int, layout: str) -> None:
    base = transformer()
    model = PeftModel(base, NAMES)
    names = [f"{name}.base_layer.weight" for name in NAMES]
    wrapped = wrap(layout, base)
    prune.compute_masks(base, 0.6, include=names).reparametrize()
    masks = prune.Masks.of(base, include=names)
    before = [whole(base.get_parameter(f"{name}_orig")).clone() for name in names]
    if layout == "fsdp2":
        wrapped.step(batches(1)[0])
        wrapped.model.zero_grad()
        before = [whole(base.get_parameter(f"{name}_orig")).clone() for name in names]
    merged = prune.merge_adapters(model)
    for name, was, mask in zip(NAMES, before, masks.values(), strict=True):
        layer: Any = merged.get_submodule(name)
        assert torch.equal(whole(layer.weight), (was + 0.25) * whole(mask))
        assert prune.is_pruned(layer)


def test_a_merge_that_fails() -> None:
    """What was merged by then has its zeros again."""
    base = transformer()
    prune.prune_model(base, 0.6, include="layers.*")
    zeros = {name: parameter == 0 for name, parameter in base.named_parameters()}
    model = PeftModel(base, NAMES)
    with pytest.raises(RuntimeError, match="out of memory"):
        prune.merge_adapters(model, fails_at=NAMES[2])
    assert torch.equal(base.get_parameter("layers.1.up.weight") == 0, zeros["layers.1.up.weight"])


class Saved(nn.Module):
    """A module of which PEFT trains a copy."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})


class SavingModel(PeftModel):
    """One more layer is trained whole, and merged as PEFT does it: the copy takes its place."""

    def __init__(self, base_model: nn.Module) -> None:
        super().__init__(base_model, NAMES)
        base_model.set_submodule("layers.0.down", Saved(base_model.get_submodule("layers.0.down")))  # type: ignore[arg-type]

    @override
    def merge_and_unload(self, fails_at: str = "") -> nn.Module:
        copied = self.base_model.get_submodule("layers.0.down.modules_to_save.default")
        self.base_model.set_submodule("layers.0.down", copied)
        return super().merge_and_unload(fails_at)


def saved_on_rank(_: int, layout: str) -> None:
    base = transformer()
    prune.prune_model(base, 0.6, include="layers.*")
    nn.init.zeros_(base.get_parameter("layers.0.down.bias"))
    zeros = whole(base.get_parameter("layers.0.down.weight")) == 0
    model = SavingModel(base)
    with torch.no_grad():
        for parameter in base.get_submodule("layers.0.down.modules_to_save").parameters():
            parameter.add_(1)  # it was trained, and nothing held its zeros
    wrap(layout, base)
    merged = prune.merge_adapters(model)
    assert torch.equal(whole(merged.get_parameter("layers.0.down.weight")) == 0, zeros)
    assert whole(merged.get_parameter("layers.0.down.bias")).all()


@pytest.mark.parametrize("layout", ["plain", "fsdp2"])
@pytest.mark.parametrize("merged", [merged_on_rank, merged_into_masks, saved_on_rank])
def test_zeros_stay(pool: ProcessPool, merged: Callable[[int, str], None], layout: str) -> None:
    pool.run(1 if layout == "plain" else 2, merged, layout)


def fsdp1_on_rank(_: int) -> None:
    base = transformer()
    model = PeftModel(base, NAMES)
    sharded = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(NotImplementedError, match=r"up.base_layer.weight' is FSDP1's"):
        prune.merge_adapters(sharded)


def test_bad_input(pool: ProcessPool) -> None:
    with pytest.raises(TypeError, match="a Transformer has no merge_and_unload"):
        prune.merge_adapters(transformer())
    with pytest.raises(ValueError, match="has no adapters"):
        prune.merge_adapters(PeftModel(transformer(), []))
    pool.run(2, fsdp1_on_rank)
