"""Units that stay, and refitted weights, are those of the plain oracle, and the same on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import nn
from typing_extensions import override

from distprune.removal.choose_units import choose_units
from distprune.removal.criteria import Criterion, UnitEvidence
from distprune.removal.rebuild import remove_units
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.oneshot.alike import sharded
from tests.removal.layouts import LAYOUTS
from tests.removal_oracle import Reader, plain_removal
from tests.worlds import all_raise, drawing, run_threads
from tests.wrapped import whole

TOKENS = samples(5)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}  # of 6 features
_QKV = tuple((f"self_attn.{letter}_proj.weight", 0, width) for letter, width in (("q", 12), ("k", 6), ("v", 6)))
_MLP = tuple((f"mlp.{name}_proj.weight", 0, 1) for name in ("gate", "up"))
_FC1 = (("fc1.weight", 0, 1), ("fc1.bias", 0, 1))
READERS = {
    "llama": [
        Reader("heads", "self_attn.o_proj", 4, 6, 2),
        Reader("kv_groups", "self_attn.o_proj", 2, 12, 1, _QKV),
        Reader("mlp", "mlp.down_proj", 40, 1, 1, _MLP),
    ],
    "opt": [Reader("heads", "self_attn.out_proj", 2, 12), Reader("mlp", "fc2", 40, 1, 1, _FC1)],
    "gpt2": [Reader("mlp", "mlp.c_proj", 96, 1)],
    "gpt_neox": [Reader("mlp", "mlp.dense_4h_to_h", 40, 1)],  # attention, which stays, adds to hidden states with it
    "mixtral": [Reader("mlp", f"mlp.experts.down_proj.{expert}", 40, 1) for expert in range(4)],
}
CHANGES: dict[str, dict[str, Any]] = {"llama": HEADS, "mixtral": HEADS}
for far in ("opt 3", "opt 10"):  # fc2 is given what is so far from 0; the next block would be given what that lost
    READERS[far], CHANGES[far] = [Reader("mlp", "fc2", 40, 1, 1, _FC1)], {"num_hidden_layers": 1}
# What is asked for; what is not said is as it is by default.
Case: TypeAlias = tuple[str, Any, dict[str, Any]]
BOTH: Any = {"mlp": 30, "heads": 2}
CASES: list[Case] = [
    ("llama", BOTH, {}),
    ("llama", {"mlp": 29, "kv_groups": 1}, {"targets": "own"}),
    ("llama", BOTH, {"layers": [0, 2]}),  # healed
    ("llama", BOTH, {"targets": "dense"}),
    ("llama", {"heads": 2}, {}),
    ("llama", {}, {"layers": [1]}),  # at both ends
    ("llama", BOTH, {"criterion": "taylor"}),
    ("llama", BOTH, {"criterion": "fluctuation", "refit": "none"}),
    ("llama", {"mlp": 30, "kv_groups": 1}, {"criterion": "magnitude", "refit": "none"}),
    ("llama", BOTH, {"criterion": "activation"}),
    ("opt", {"mlp": 30, "heads": 1}, {}),
    ("opt", {"mlp": 30}, {"criterion": "fluctuation", "refit": "bias"}),
    ("opt", {"mlp": 30}, {"criterion": "magnitude"}),
    ("opt 3", {"mlp": 30}, {"targets": "own"}),
    ("opt 10", {"mlp": 30}, {"targets": "own"}),
    ("opt 10", {"mlp": 30}, {"criterion": "fluctuation", "refit": "bias"}),
    ("gpt2", {"mlp": 70}, {"targets": "own"}),
    ("gpt_neox", {"mlp": 30}, {}),
    ("mixtral", {"mlp": 30}, {}),
    ("mixtral", {"mlp": 30}, {"criterion": "taylor", "refit": "none"}),
]
LEAST_SQUARES: Any = {"refit": "least_squares"}  # without a fit of whole blocks, which the oracle does not know
Chosen: TypeAlias = tuple[dict[Any, list[int]], dict[str, torch.Tensor]]


def make(architecture: str) -> nn.Module:
    """Return the same model on every rank, with biases that matter."""
    kind, _, far = architecture.partition(" ")
    model = tiny_model(kind, **CHANGES.get(architecture, {}))
    with drawing(1), torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            if far and name.endswith("fc1.bias"):
                parameter.add_(float(far))
    return model


def chosen(model: nn.Module, case: Case) -> Chosen:
    _, keep, how = case
    with warnings.catch_warnings(action="ignore"):
        removal = choose_units(model, TOKENS, keep, **LEAST_SQUARES | how)
    assert [block.index for block in removal.report.blocks] == how.get("layers", [*range(len(removal.report.blocks))])
    weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
    return {key: units.tolist() for key, units in removal.kept.items()}, weights


def check_alike(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, weight in found.items():
        assert float((weight - wanted[name]).norm()) <= tolerance * float(wanted[name].norm()), name


def by_kind(kept: Mapping[tuple[str, str, str], list[int]]) -> dict[tuple[str, str], list[list[int]]]:
    return {key[:2]: [units for other, units in kept.items() if other[:2] == key[:2]] for key in kept}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(5)
def test_is_the_oracles(case: Case) -> None:
    architecture, keep, how = case
    plain = make(architecture)
    refit = how.get("refit", "least_squares")
    share = 0.5 if how.get("targets", "dense" if refit == "least_squares" else "own") == "dense" else 0.0
    more: dict[str, Any] = {key: how[key] for key in ("criterion", "refit", "layers") if key in how}
    more["own_heads"] = "targets" not in how
    wanted = plain_removal(plain, TOKENS, READERS[architecture], keep, share=share, **more)
    model = make(architecture)
    kept, weights = chosen(model, case)
    assert by_kind(kept) == by_kind(wanted)
    check_alike(weights, {name: parameter.detach() for name, parameter in plain.named_parameters()}, 1e-3)


def on_rank(_: int, wrap: Callable[[nn.Module], nn.Module] | None, cases: list[Case]) -> list[Chosen]:
    models = [make(architecture) for architecture, _, _ in cases]
    return [chosen(wrap(model) if wrap else model, case) for model, case in zip(models, cases, strict=True)]


class Near(Criterion):
    """Other units if weights that several ranks hold counted several times."""

    needs = ("norms",)

    @override
    def scores(self, evidence: UnitEvidence) -> torch.Tensor:
        assert evidence.norms is not None
        return (evidence.norms - 2.6).abs()


OVER_RANKS = [CASES[i] for i in (0, 1, 2, 8, 10, 12, 13, 16)]
OVER_RANKS.append(("llama", {"mlp": 30}, {"criterion": Near(), "refit": "none"}))
OTHERS = [CASES[i] for i in (6, 11, 14, 18)]


@pytest.mark.parametrize(
    ("num_ranks", "wrap", "cases"),
    [
        (2, None, OVER_RANKS),
        (3, sharded, OVER_RANKS),
        (2, sharded, OTHERS),
        # Rows that are cut along their inputs; a bias that every rank holds.
        (2, LAYOUTS["tp"], [("llama", {"mlp": 30, "kv_groups": 1}, {}), ("gpt_neox", {"mlp": 30}, {})]),
        (4, partial(sharded, mesh_shape=(2, 2)), OTHERS),
    ],
    ids=["plain", "fsdp2", "fsdp2", "tp", "hsdp"],
)
@pytest.mark.sampled(3)
def test_ranks_do_what_one_does(
    num_ranks: int, wrap: Callable[[nn.Module], nn.Module] | None, cases: list[Case]
) -> None:
    everywhere = run_threads(num_ranks, on_rank, wrap, cases)
    for case, *of_ranks in zip(cases, *everywhere, strict=True):
        kept, weights = chosen(make(case[0]), case)
        for of_rank in of_ranks:
            assert of_rank[0] == kept, case
            check_alike(of_rank[1], weights, 1e-3)


class Energy(Criterion):
    """One of a user's own; NaN of a block whose products are those of the second run."""

    def __init__(self, spoil: int = -1) -> None:
        self.spoil, self.num_calls = spoil, 0

    @override
    def scores(self, evidence: UnitEvidence) -> torch.Tensor:
        self.num_calls += 1
        scores = evidence.of_units(evidence.mean_squares)
        return scores / 0 * 0 if self.num_calls == self.spoil else scores


def test_blocks_are_fitted() -> None:
    """What goes is what goes without; zeroed inputs of the layer that read it stay zero."""
    plain, model = make("llama"), make("llama")
    kept, _ = chosen(plain, ("llama", {"mlp": 30}, {}))
    removal = choose_units(model, TOKENS, {"mlp": 30})
    fits = [of for block in removal.report.blocks if (of := block.fit) is not None]
    assert len(fits) == len(removal.report.blocks)
    assert any(of.after < of.before for of in fits)
    first, *_ = removal.kept
    assert removal.kept[first].tolist() == kept[first]
    for (block, *_), units in removal.kept.items():
        left = model.get_parameter(f"{block}.mlp.down_proj.weight").detach().any(dim=0)
        assert left.nonzero()[:, 0].tolist() == units.tolist()


def spoiled(rank: int, what: str) -> None:
    model: Any = make("llama")
    if what == "scores":
        choose_units(sharded(model), TOKENS, {"mlp": 30}, criterion=Energy(spoil=1 if rank == 0 else 0))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(1e30)  # products of float32 that are infinite
        choose_units(sharded(model), TOKENS, {"mlp": 30})


@pytest.mark.parametrize(("what", "match"), [("scores", "layers.0.mlp.down_proj"), ("inputs", "layers.1'.*down_proj")])
def test_statistics_that_are_nan_are_named(what: str, match: str) -> None:
    for error in all_raise(2, spoiled, what, kind=ValueError, match=match):
        assert "NaN" in str(error)


def test_zeros_stay_and_what_goes_is_zero() -> None:
    model: Any = make("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3:7, ::2] = 0
        model.model.layers[1].self_attn.o_proj.weight[3:7] *= -0.0  # as other tools leave some
    kept, weights = chosen(model, ("llama", {"mlp": 30}, {"refit": "block"}))
    assert not weights["model.layers.1.self_attn.o_proj.weight"][3:7].any()
    weight = weights["model.layers.0.mlp.down_proj.weight"]
    stays = torch.zeros(40, dtype=torch.bool)
    stays[kept["model.layers.0", "mlp", "mlp"]] = True
    assert not weight[3:7, ::2].any()
    assert not weight[:, ~stays].any()
    assert weight[:3, stays].all()


def test_gradients_that_nothing_needs() -> None:
    model = make("llama")
    without: list[dict[str, Any]] = [{"refit": "none"}, {"targets": "own"}]
    for how in without:
        assert choose_units(model, TOKENS, {}, layers=[0, 2], criterion="taylor", **how).kept == {}


def test_a_norm_behind_the_layer_before_a_gap() -> None:
    """What the linear layer puts out is not added as it is: it is left, and a warning says so."""
    model: Any = tiny_model("gemma2", **ONE_SHOT_ARCHITECTURES["gemma"] | {"num_hidden_layers": 3})
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    with pytest.warns(UserWarning, match="layers.0.mlp.down_proj' cannot make up"):
        choose_units(model, TOKENS, {}, layers=[0, 2], **LEAST_SQUARES)
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, before)


@pytest.mark.parametrize("case", [("llama", BOTH), ("llama", {"kv_groups": 1}), ("opt", {"mlp": 30})], ids=str)
def test_what_is_cut_puts_out_what_is_zeroed(case: tuple[str, Any]) -> None:
    model: Any = make(case[0])
    kept = choose_units(model, TOKENS, case[1]).kept
    with torch.no_grad():
        zeroed = model(input_ids=TOKENS, use_cache=False).logits
        remove_units(model, kept)
        cut = model(input_ids=TOKENS, use_cache=False).logits
    assert float((cut - zeroed).abs().max()) < 1e-4 * float(zeroed.abs().max())
