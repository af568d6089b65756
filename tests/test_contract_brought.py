"""What people bring, in every layout torch wraps models in: what is no weight, and evidence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations
from typing_extensions import override

import distprune as prune
from tests.worlds import ProcessPool, drawing
from tests.wrapped import PRUNED, SIZE, WRAPPERS, Transformer, transformer, wrap

LAYOUTS = {name: max(sizes[:2]) for wrappers in WRAPPERS.values() for name, (_, sizes) in wrappers.items()}
BY_DEFAULT = ("plain", "ddp", "fsdp1", "fsdp2", "fsdp-tp")
ALL = [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.whole) for name in LAYOUTS]

PARAMETRIZED = "under a parametrization"
LEFT_OUT = {
    "attention.A_log": "kept beside layers, no weight by its name",
    "attention.relative_position_bias_table": "a bias or a table",
    "experts.gate.weight": "a router",
    "scale.weight": "a gate: it has one output",
    "normed.parametrizations.weight.original0": PARAMETRIZED,
    "normed.parametrizations.weight.original1": PARAMETRIZED,
    "turned.parametrizations.weight.original": PARAMETRIZED,
    "older.weight_g": PARAMETRIZED,
    "older.weight_v": PARAMETRIZED,
    "adapter.lora_A.weight": "an adapter",
}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SIZE, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))


def brought() -> Transformer:
    """Return the small transformer with what is no weight in its blocks: none of it is in the forward."""
    model = transformer()
    with drawing(1):
        for block in model.layers:
            added: Any = block
            added.attention.A_log = nn.Parameter(torch.zeros(SIZE, SIZE))
            added.attention.relative_position_bias_table = nn.Parameter(torch.randn(5, 2))
            added.attention.in_proj_weight = nn.Parameter(torch.randn(SIZE, SIZE))  # a weight, by its name
            added.experts = Experts()
            added.scale = nn.Linear(SIZE, 1)
            added.normed = parametrizations.weight_norm(nn.Linear(SIZE, SIZE))
            added.turned = parametrizations.orthogonal(nn.Linear(SIZE, SIZE))
            added.older = nn.utils.weight_norm(nn.Linear(SIZE, SIZE))
            added.adapter = nn.ModuleDict({"lora_A": nn.Linear(SIZE, 2)})
    return model


def pruned_on_rank(_: int, layout: str) -> tuple[dict[str, str], list[str], list[int]]:
    model = wrap(layout, brought()).model
    report = prune.prune_model(model, 0.5)
    assert set(report.masks) == {each.name for each in report.parameters}
    hold = prune.hold_zeros(model)
    hold.remove()
    assert hold.counts_by_name().keys() == prune.Masks.of(model).sparsity(by="name").keys()
    for name, way in {
        "*.normed.*original0": "under a parametrization .WeightNorm.",
        "*.normed.*original1": "remove_parametrizations",
        "*.turned.*": "under a parametrization .Orthogonal.",
        "*.older.weight_?": "under a parametrization .WeightNorm., .* or remove_weight_norm",
    }.items():
        with pytest.raises(ValueError, match=way):
            prune.prune_model(model, 0.9, include=name)
    return dict(report.left_out), [each.name for each in report.parameters], [r.num_zeros for r in report.parameters]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("layout", ALL)
def test_what_is_no_weight_is_left_out_and_named(pool: ProcessPool, layout: str) -> None:
    alone = pool.run(1, pruned_on_rank, "plain")[0]
    assert alone[0] == {f"layers.{i}.{name}": why for i in range(2) for name, why in LEFT_OUT.items()}
    weights = [*(f"attention.{name}.weight" for name in "qkvo"), "attention.in_proj_weight", "up.weight", "down.weight"]
    weights += [f"experts.experts.{i}.weight" for i in range(3)]
    assert {*alone[1]} == {f"layers.{i}.{name}" for i in range(2) for name in weights}
    for result in pool.run(LAYOUTS[layout], pruned_on_rank, layout):
        assert result == alone


def evidence_on_rank(rank: int, layout: str) -> None:
    model = wrap(layout, transformer()).model
    names = [f"layers.{i}.{name}.weight" for i in range(2) for name in PRUNED]
    options: dict[str, Any] = {"score": "gradient", "include": names}
    with drawing(2):
        wholes = {name: torch.randn_like(transformer().get_parameter(name)) for name in names}

    def masks(evidence: dict[str, torch.Tensor]) -> prune.Masks:
        return prune.compute_masks(model, 0.5, evidence={"gradient": evidence}, **options)

    first = masks(wholes)
    assert first.equal(masks({f"module.{name}": tensor for name, tensor in wholes.items()}))
    wide = names[2]
    turned = {**wholes, wide: wholes[wide].T.contiguous()}
    assert turned[wide].shape != wholes[wide].shape
    with pytest.raises(
        ValueError, match=r"evidence 'gradient' of 'layers.0.up.weight' has the shape \(12, 18\), .* \(18,"
    ):
        masks(turned)
    with pytest.raises(
        ValueError, match=r"names 'layers.0.upp.weight', which is no parameter .*near it are .*layers.0.up"
    ):
        masks({**wholes, "layers.0.upp.weight": wholes[wide]})
    with pytest.raises(ValueError, match=r"names 'layers.0.up.weight' twice"):
        masks({**wholes, f"module.{wide}": wholes[wide]})
    if dist.is_initialized() and dist.get_world_size() > 1:
        differs = {**wholes, wide: wholes[wide] + rank}
        with pytest.raises(ValueError, match=r"'?layers.0.up.weight'?.* (differs between ranks|differ)"):
            masks(differs)


@pytest.mark.parametrize("layout", ALL)
def test_evidence_is_of_the_parameter_and_the_same_on_all_ranks(pool: ProcessPool, layout: str) -> None:
    pool.run(LAYOUTS[layout], evidence_on_rank, layout)


def test_under_a_parametrization_that_keeps_zeros_a_weight_is_pruned_by_name() -> None:
    class Halved(nn.Module):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    class Symmetric(nn.Module):
        @override
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).T

    with drawing(0):
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    nn.utils.parametrize.register_parametrization(layers[0], "weight", Halved())
    parametrizations.spectral_norm(layers[1])
    nn.utils.spectral_norm(layers[2])
    nn.utils.parametrize.register_parametrization(layers[3], "weight", Symmetric())
    with pytest.raises(ValueError, match=r"there is no parameter to prune; .* is under a parametrization"):
        prune.prune_model(layers, 0.5)
    state = {name: value.clone() for name, value in layers.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"'3.parametrizations.weight.original' is under a parametrization .Symmetric."
    ):
        prune.prune_model(layers, 0.5, include=["*original*", "*orig"])
    assert all(torch.equal(value, state[name]) for name, value in layers.state_dict().items())
    prune.prune_model(layers, 0.5, include=["*original*", "*orig"], exclude="3.*", scope="tensor")
    x = torch.ones(1, 8)
    for layer in list(layers)[:3]:
        layer(x)
        assert torch.count_nonzero(getattr(layer, "weight")) == 32  # noqa: B009  # no parameter, says its type
        assert layer(x).isfinite().all()
    prune.prune_model(layers, 0.75, include=layers[0])
    assert torch.count_nonzero(getattr(layers[0], "weight")) == 16  # noqa: B009
