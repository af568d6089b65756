"""What one-shot pruning says, refuses and resumes."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch

from distprune import Block, Channels, NByM, PerRow, Unstructured
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import count_parameters
from distprune.models.linear_layers import linear_layers
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.recipe import OneShotMethod
from distprune.oneshot.report import BlockReport
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import sharded
from tests.oneshot_oracle import listening
from tests.worlds import all_raise, run_threads

TOKENS = samples(4)
HALF = Unstructured(0.5)
METHODS: tuple[OneShotMethod, ...] = ("wanda", "sparsegpt", "admm", "magnitude", "random")


def test_patterns_refuse_nonsense() -> None:
    kinds: tuple[Any, ...] = (Unstructured, PerRow)
    refused: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        *((kind, (share,), ValueError, "is outside") for kind in kinds for share in (-0.1, 1.5, math.nan, math.inf)),
        *((kind, (share,), TypeError, "sparsity must be") for kind in kinds for share in ("0.5", True, None)),
        *((NByM, pair, ValueError, "is not a pattern") for pair in ((0, 4), (4, 4), (5, 4), (-1, 2))),
        (NByM, (2, 4.0), TypeError, "m must be an int"),
        (Block, (0, 0.5), ValueError, "size=0 is less than 1"),
        *((Block, (size, 0.5), TypeError, "size must be an int") for size in (4.0, True, "4")),
        *((Channels, (0.5, dim), TypeError, "dim must be an int") for dim in (4.0, True, "4")),
    ]
    for kind, arguments, error, words in refused:
        with pytest.raises(error, match=words):
            kind(*arguments)


def with_new_weights_that_overflow(_: int, shard: bool, block: int) -> None:
    model: Any = tiny_model("llama").half()
    linear = model.model.layers[block].mlp.down_proj
    with torch.no_grad():
        linear.weight.copy_(torch.where(linear.weight > 0, 65000.0, -65000.0))
    prune_blocks(sharded(model) if shard else model, TOKENS, method="sparsegpt", pattern=HALF)


@pytest.mark.parametrize(("num_ranks", "block"), [(1, 2), (2, 0)])
def test_new_weights_that_overflow_are_refused(num_ranks: int, block: int) -> None:
    """In the last block, too, whose outputs nobody looks at; and on all ranks."""
    named = f"the new weights of 'model.layers.{block}.mlp.down_proj' are NaN or infinite"
    all_raise(num_ranks, with_new_weights_that_overflow, num_ranks > 1, block, match=named)


def in_rounds(_: int, changes: dict[str, Any], how: dict[str, Any]) -> list[int]:
    model = sharded(tiny_model("llama", **changes))
    return [block.num_rounds for block in prune_blocks(model, TOKENS, pattern=HALF, **how).blocks]


def test_rounds_of_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice for every block of columns of each input."""
    num_rounds = {}
    for columns in (128, 8):
        monkeypatch.setattr("distprune.oneshot.sparsegpt.COLUMNS", columns)
        num_rounds[columns], same = run_threads(2, in_rounds, {}, {"method": "sparsegpt"})
        assert num_rounds[columns] == same
    first, second, last = num_rounds[128]
    assert first == second == last + 1 <= 100  # behind the last, nothing is run
    assert num_rounds[8][0] > first


@pytest.mark.whole
def test_rounds_layer_by_layer() -> None:
    """As many for every block, but that the first learns the order, and however wide; no more than 40 a stage."""
    (first, *others), wider = (
        run_threads(2, in_rounds, {"num_hidden_layers": 4, "intermediate_size": width}, {"refit": "none"})[0]
        for width in (40, 80)
    )
    assert first > others[0] == others[1] == others[2] + 1  # behind the last, nothing is run
    assert wider == [first, *others]
    assert others[0] <= 2 + 4 * 40


@pytest.mark.parametrize("method", METHODS)
def test_going_on_after_two_blocks(method: OneShotMethod) -> None:
    """One stream of hidden states is held, and the dense one where there is one, also while it is not known yet
    whether a block is restored."""
    whole, part = tiny_model("llama"), tiny_model("llama")
    states: list[dict[str, torch.Tensor]] = []
    seen: list[BlockReport] = []

    def on_block(index: int, report: BlockReport) -> None:
        assert report.index == index
        seen.append(report)
        states.append(copy.deepcopy(whole.state_dict()))

    how: dict[str, Any] = {"method": method, "pattern": HALF, "seed": 5}
    full = prune_blocks(whole, TOKENS, on_block=on_block, **how)
    assert list(full.blocks) == seen
    num_streams = list[float]()

    def hidden_states() -> list[torch.Tensor]:
        """Of batches of windows."""
        gc.collect()
        found = [of for of in gc.get_objects() if type(of) is torch.Tensor and of.ndim == 3]
        return [of for of in found if of.shape[1:] == (TOKENS.shape[1], 24)]

    others = hidden_states()  # of other tests: kept alive, so that their memory is not used again
    known = {of.untyped_storage().data_ptr() for of in others}

    def finished(index: int) -> bool:
        found = {of.untyped_storage().data_ptr(): len(of) for of in hidden_states()}
        num_streams.append(sum(num for where, num in found.items() if where not in known) / len(TOKENS))
        if index < 2:
            prefix = f"{full.blocks[index].name}."
            own = {name: value for name, value in states[index].items() if name.startswith(prefix)}
            part.load_state_dict(own, strict=False)
        return index < 2

    rest = prune_blocks(part, TOKENS, finished=finished, **how)
    assert num_streams == [2 if method == "admm" else 1] * 3
    assert rest.num_parameters is None
    assert [block.layers for block in rest.blocks] == [block.layers for block in full.blocks[2:]]
    for name, value in part.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name])


def calls_back(rank: int) -> tuple[int, list[int]]:
    seen: list[int] = []
    on_block = None if rank else lambda index, _: seen.append(index)
    return prune_blocks(tiny_model("llama"), TOKENS, 0.5, method="wanda", on_block=on_block).num_rounds, seen


def test_a_callback_on_one_rank_alone() -> None:
    (num_rounds, first), (same, other) = run_threads(2, calls_back)
    assert (first, other) == ([0, 1, 2], [])
    assert num_rounds == same


def test_offload_changes_nothing() -> None:
    one, other = tiny_model("gpt2"), tiny_model("gpt2")
    prune_blocks(one, TOKENS, method="sparsegpt", pattern=HALF)
    prune_blocks(other, TOKENS, method="sparsegpt", pattern=HALF, offload=True)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize(
    ("method", "dead", "within"),
    [("sparsegpt", False, 1e-3), ("sparsegpt", True, 1e-3), ("wanda", False, 0.15), ("random", True, 0.15)],
)
def test_error_is_that_of_the_outputs(method: OneShotMethod, dead: bool, within: float) -> None:
    """||X (W - W')^T|| / ||X W^T||, from the activations themselves; all but SparseGPT estimate it."""
    model: Any = tiny_model("llama")
    if dead:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3] = 0  # an input of down_proj that is always 0
    block, inputs = decoder_blocks(model)[0][1], list[dict[str, torch.Tensor]]()
    for tokens in TOKENS:
        with torch.no_grad(), listening(block, linear_layers(block)) as given:
            model(input_ids=tokens[None])
        inputs.append(given.inputs)
    before = {name: linear.parameter.detach().clone() for name, linear in linear_layers(block).items()}
    report = prune_blocks(model, TOKENS, method=method, pattern=HALF, seed=1)
    for of_layer, (name, linear) in zip(report.blocks[0].layers, linear_layers(block).items(), strict=True):
        x = torch.cat([of_sample[name] for of_sample in inputs]).double()
        change = x @ (before[name] - linear.parameter.detach()).double().t()
        wanted = float(change.norm() / (x @ before[name].double().t()).norm())
        assert of_layer.relative_error == pytest.approx(wanted, rel=within)
        assert of_layer.num_tokens == len(x)


@pytest.mark.parametrize("method", ["sparsegpt", "admm"])
def test_inputs_that_are_always_0_have_no_weights(method: OneShotMethod) -> None:
    """Also where the pattern keeps one of them: three of four are."""
    model: Any = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj.weight[4:7] = 0
    prune_blocks(model, TOKENS, method=method, pattern="2:4", permute="none")
    assert not mlp.down_proj.weight[:, 4:7].any()


def test_an_expert_without_tokens_is_reported() -> None:
    model: Any = tiny_model("mixtral")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()  # the first two experts win everywhere
    report = prune_blocks(model, TOKENS, method="sparsegpt", pattern=NByM(2, 4))
    assert len(report.blocks[0].unseen) == 4
    for of_layer in report.blocks[0].layers:
        assert of_layer.num_pruned * 2 == of_layer.num_elements
        assert (of_layer.num_tokens == 0) == (of_layer.name in report.blocks[0].unseen)
    assert report.to_dict()["blocks"][0]["unseen"] == list(report.blocks[0].unseen)


def test_report_in_numbers() -> None:
    model = tiny_model("llama")
    model.train()
    report = prune_blocks(model, TOKENS, method="random", pattern=HALF)
    assert model.training
    assert report.seed is not None
    assert report.num_samples == 4
    assert report.num_parameters == count_parameters(model)
    assert report.num_bytes >= sum(block.num_bytes for block in report.blocks) > 0
    assert report.num_rounds >= sum(block.num_rounds for block in report.blocks) > 0
    assert len(report.peak_memory) == 1
    assert report.peak_memory[0] > 1 << 20
    assert set(report.blocks[0].seconds) == {"forward", "reduce", "target", "factor", "sweep", "fit"}
    again = tiny_model("llama")
    prune_blocks(again, TOKENS, method="random", pattern=HALF, seed=report.seed)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_stays_dense_is_listed() -> None:
    block = prune_blocks(tiny_model("qwen2_moe"), TOKENS, method="wanda", pattern=HALF).blocks[0]
    assert block.dense == {
        "model.layers.0.mlp.gate.weight": "a router",
        "model.layers.0.mlp.shared_expert_gate.weight": "a gate: it has one output",
    }
    assert block.to_dict()["dense"] == block.dense
