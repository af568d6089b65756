"""A model cut in any layout is the one made of dense slices: names, values, configuration, training, generation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distprune.models import decoder_blocks
from distprune.removal import remove_layers, remove_units
from tests.architectures import samples, tiny_model
from tests.removal.sliced import SCRIPTS, Script, kept_units, sliced
from tests.worlds import run_threads

TOKENS = samples(4)
PLAN = {
    **{f"self_attn.{kind}_proj": ColwiseParallel for kind in "qkv"},
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def shard(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    for _, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **{k: v for k, v in options.items() if k != "shard_placement_fn"})


def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
    for _, block in decoder_blocks(model):
        parallelize_module(block, mesh, {name: style() for name, style in PLAN.items()})
    return model


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


def fsdp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def hsdp(model: nn.Module) -> nn.Module:
    return shard(model, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s")))


def tp(model: nn.Module) -> nn.Module:
    return parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    return shard(parallelize(model, mesh["tp"]), mesh["dp"])


def root_only(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "fsdp": fsdp(),
    "fsdp-columns": fsdp(shard_placement_fn=columns),
    "fsdp-offload": fsdp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp-to-2": fsdp(reshard_after_forward=2),
    "fsdp-bf16": fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "root": root_only,
    "hsdp": hsdp,
    "tp": tp,
    "fsdp-tp": fsdp_tp,
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the logits, the loss's gradients and the parameters after a step of a new optimizer, whole."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits: torch.Tensor = model(TOKENS).logits
    logits.float().pow(2).mean().backward()  # type: ignore[no-untyped-call]
    found = {f"{name}.grad": whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return {"logits": whole(logits)} | found | {name: whole(p) for name, p in model.named_parameters()}


def remove(_: int, script: Script, small: nn.Module, layout: str, runs_before: bool) -> dict[str, Any]:
    model: Any = LAYOUTS[layout](script.make())
    if runs_before:
        model(TOKENS[:1]).logits.float().sum().backward()
    kind = type(model)
    remove_units(model, kept_units(script, len(decoder_blocks(model))))
    assert type(model) is kind
    model.zero_grad()
    found: dict[str, Any] = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    fresh = LAYOUTS[layout](copy.deepcopy(small))
    for (name, parameter), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert parameter.stride() == other.stride(), name
        if isinstance(parameter, DTensor):  # as if it had been wrapped at this size
            assert parameter.placements == other.placements, name
            assert torch.equal(parameter.to_local(), other.to_local()), name
    return {"state": found, "config": model.config.to_dict(), "step": step(model)}


ON_RANKS = [
    *[(name, "plain", 1) for name in SCRIPTS],
    *[(name, "fsdp", 2 + index % 3) for index, name in enumerate(SCRIPTS)],
    *[("llama-heads", layout, 2) for layout in LAYOUTS if layout not in ("plain", "hsdp", "fsdp-to-2", "fsdp-tp")],
    *[("llama", layout, 4) for layout in ("hsdp", "fsdp-tp", "fsdp-to-2")],
    ("mixtral", "hsdp", 4),
    ("qwen2", "tp", 2),
    ("qwen2", "fsdp-tp", 4),
]


@pytest.mark.parametrize(("name", "layout", "num_ranks"), ON_RANKS)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # OPT
def test_cut_is_sliced(name: str, layout: str, num_ranks: int) -> None:
    script = SCRIPTS[name]
    model = script.make()
    small: Any = sliced(script, kept_units(script, len(decoder_blocks(model))), model)
    state = {key: tensor.clone() for key, tensor in small.state_dict().items()}
    config = small.config.to_dict()
    expected = step(copy.deepcopy(small))
    runs_before = name in ("llama-heads", "mixtral", "qwen2")
    for found in run_threads(num_ranks, remove, script, small, layout, runs_before):
        assert found["state"].keys() == state.keys()
        for key, tensor in state.items():
            assert torch.equal(found["state"][key], tensor), key
        assert {k: v for k, v in found["config"].items() if config.get(k, v) != v} == {}
        assert found["step"].keys() == expected.keys()
        for key, tensor in expected.items():
            if "bf16" in layout:
                assert found["step"][key].shape == tensor.shape
            elif key == "logits" and layout in ("plain", "fsdp"):
                assert torch.equal(found["step"][key], tensor)
            else:
                assert torch.allclose(found["step"][key], tensor, atol=1e-4, rtol=1e-3), key


@torch.no_grad()
def test_layers_leave_and_the_others_close_up() -> None:
    for architecture, sizes in (
        ("llama", {"num_hidden_layers": 4}),
        ("bloom", {"n_layer": 4}),
        ("gpt2", {"n_layer": 4}),
    ):
        model: Any = tiny_model(architecture, **sizes)
        blocks = [block for _, block in decoder_blocks(model)]
        remove_layers(model, [0, 3])
        assert [block for _, block in decoder_blocks(model)] == [blocks[0], blocks[3]]
        small: Any = type(model)(type(model.config).from_dict(model.config.to_dict())).eval()
        small.load_state_dict(model.state_dict())
        assert torch.equal(model(TOKENS).logits, small(TOKENS).logits)
        assert torch.equal(generated(model), generated(small))


def generated(model: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(TOKENS[:, :4], max_new_tokens=4, do_sample=False)
    return tokens
