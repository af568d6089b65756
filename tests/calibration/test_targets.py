"""The order in which blocks run their layers, what they add to, and what the dense stream leaves behind."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch.library import custom_op

from distprune import Unstructured, prune_blocks
from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.order import BlockOrder, learn_order
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.statistics import InputStatistics
from distprune.calibration.targets import Targets
from distprune.calibration.walk import spread
from distprune.collectives.communicator import Alone, communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.linear_layers import linear_layers
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.worlds import run_threads

TOKENS = samples(3)

EXPERTS = ("gate_up_proj", "down_proj")

# By architecture: the stages, and what adds to hidden states as it is.
ORDERS = {
    "llama": (
        [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]],
        "o_proj down_proj",
    ),
    "phi": ([["q_proj", "k_proj", "v_proj", "fc1"], ["dense"], ["fc2"]], "dense fc2"),
    "gpt2": ([["c_attn"], ["c_proj"], ["c_fc"], ["c_proj"]], "c_proj c_proj"),
    # Behind a norm, outputs are not added as they are.
    "gemma2": ([["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]], ""),
    "mixtral": (
        [["q_proj", "k_proj", "v_proj"], ["o_proj"], *([f"{kind}.{e}" for e in range(4)] for kind in EXPERTS)],
        "o_proj",
    ),
}


def model_of(architecture: str) -> Any:
    return tiny_model(architecture, **(ONE_SHOT_ARCHITECTURES["gemma"] if architecture == "gemma2" else {}))


def order_of(model: Any) -> BlockOrder:
    walk = catch_inputs(model, spread(TOKENS, SampleGroup()))
    return learn_order(Alone(), walk, 0, linear_layers(walk.blocks[0][1]))


@pytest.mark.parametrize("architecture", ORDERS)
def test_order(architecture: str) -> None:
    order = order_of(model_of(architecture))
    stages, adding = ORDERS[architecture]
    ends = [
        [name.endswith(end) for name, end in zip(*pair, strict=True)] for pair in zip(order.stages, stages, strict=True)
    ]
    assert all(all(of_stage) for of_stage in ends), order.stages
    assert sorted(name.rpartition(".")[2] for name in order.adding) == sorted(adding.split())
    assert order.adding.isdisjoint(order.shifted)
    assert order.called_once == {name for stage in order.stages for name in stage}


@custom_op(
    "distprune_tests::add_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight) -> (Tensor, Tensor)",
)
def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As fused kernels do: the sum that is normalised, and the sum."""
    total = x + residual
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight, total


def fused(hidden_states: torch.Tensor, *, layer: Any, closing: str, **kwargs: Any) -> torch.Tensor:
    """The forward of a Llama's ``layer`` in which no addition shows: not before the MLP, and, if asked for, behind."""
    given = layer.input_layernorm(hidden_states)
    attended, _ = layer.self_attn(hidden_states=given, **kwargs)
    norm, total = torch.ops.distprune_tests.add_norm(attended, hidden_states, layer.post_attention_layernorm.weight)
    put_out = layer.mlp(norm)
    if closing == "added":
        return torch.as_tensor(total + put_out)
    return torch.as_tensor(torch.ops.distprune_tests.add_norm(put_out, total, layer.input_layernorm.weight)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("closing", ["added", "fused"])
def test_sums_that_no_function_shows(closing: str, dtype: torch.dtype) -> None:
    """Heads as wide as hidden states, so that every layer of attention could be one that adds to them."""
    plain, other = (tiny_model("llama", num_key_value_heads=2).to(dtype) for _ in range(2))
    wanted = order_of(plain)
    for _, layer in decoder_blocks(other):
        vars(layer)["forward"] = partial(fused, layer=layer, closing=closing)
    found = order_of(other)
    assert found == wanted
    if dtype == torch.float32:
        how: dict[str, Any] = {"method": "admm", "pattern": Unstructured(0.5)}
        reports = [prune_blocks(model, TOKENS, **how, refit="none") for model in (plain, other)]
        with pytest.raises(NotImplementedError, match=r"refit='none'.*no autograd formula"):
            prune_blocks(other, TOKENS, **how)
        for block in (*reports[0].blocks, *reports[1].blocks):
            assert block.residual == (f"{block.name}.self_attn.o_proj", f"{block.name}.mlp.down_proj")
        for name, one in plain.state_dict().items():
            assert float((one - other.state_dict()[name]).norm()) <= 1e-4 * float(one.norm()), name


def run_gate(mlp: Any, given: Any, _: Any) -> None:
    mlp.gate_proj(*given)


def order_on_rank(rank: int, architecture: str) -> BlockOrder:
    """Each rank has a sample of its own; in a Llama on the second one a layer runs twice."""
    model = model_of(architecture)
    if rank == 1 and architecture == "llama":
        _, layer = decoder_blocks(model)[0]
        layer.get_submodule("mlp").register_forward_hook(run_gate)
        vars(layer)["forward"] = partial(fused, layer=layer, closing="added")
    walk = catch_inputs(model, spread(TOKENS[rank : rank + 1], SampleGroup()))
    return learn_order(communicator(), walk, 0, linear_layers(walk.blocks[0][1]))


def test_ranks_learn_one_order() -> None:
    """Of a mixture, whose samples reach different experts, it is that of one rank."""
    assert run_threads(3, order_on_rank, "mixtral") == [order_of(model_of("mixtral"))] * 3
    one = order_of(model_of("llama"))
    called_once = one.called_once - {"mlp.gate_proj"}
    both = dataclasses.replace(one, called_once=called_once)
    assert run_threads(2, order_on_rank, "llama") == [both] * 2


def test_a_stage_runs_no_further_than_it_has_to() -> None:
    """Of the four stages of a block, the last alone runs the last layer; so do the dense and the final run."""
    model = tiny_model("llama", num_hidden_layers=2)
    num_runs = {"q_proj": 0, "down_proj": 0}
    for name, module in model.named_modules():
        if (kind := name.rpartition(".")[2]) in num_runs and ".0." in name:
            module.register_forward_hook(lambda *_, kind=kind: num_runs.update({kind: num_runs[kind] + 1}))
    prune_blocks(model, TOKENS, method="admm", pattern=Unstructured(0.5), refit="none", batch_tokens=1)
    learning = 2  # how blocks are called, and in which order
    # The dense run, the four stages (the first one until v_proj is given its input), and the run of the pruned block.
    assert num_runs["q_proj"] == learning + 6 * len(TOKENS)
    assert num_runs["down_proj"] == learning + 3 * len(TOKENS)


def nan_in_one_stream(rank: int, stream: str) -> None:
    model, comm = tiny_model("llama"), communicator()
    linears = linear_layers(decoder_blocks(model)[0][1])
    walk = catch_inputs(model, spread(TOKENS[:1], SampleGroup()))
    targets = Targets(walk, learn_order(Alone(), walk, 0, linears), linears)
    walk.begin_dense()
    targets.run(Alone(), 0, linears)
    if rank == 1:
        spoiled = walk.hidden[0][0] if stream == "pruned" else targets.inputs[0]["mlp.up_proj"][0]
        spoiled[3] = torch.nan
    statistics = InputStatistics(comm, walk, linears, "products", targets)
    statistics.run(0)
    list(statistics.reduce())


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ("dense", r"NaN or Inf in the inputs of 'mlp.gate_proj' in the dense stream"),
        ("pruned", r"NaN or Inf in the inputs of 'self_attn.q_proj', .*[^m]$"),
    ],
)
def test_nan_names_the_stream(stream: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_threads(2, nan_in_one_stream, stream)
