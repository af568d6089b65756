"""What one-shot pruning says, refuses and resumes."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from distprune import Block, Channels, NByM, PerRow, Unstructured
from distprune.calibration.moments import Moments
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import count_parameters
from distprune.models.linear_layers import linear_layers
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.recipe import OneShotMethod
from distprune.oneshot.report import BlockReport
from distprune.oneshot.sparsegpt import DAMPING, SparseGPT
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import sharded
from tests.worlds import ProcessPool, run_threads

TOKENS = samples(4)
HALF = Unstructured(0.5)
METHODS: tuple[OneShotMethod, ...] = ("wanda", "sparsegpt", "admm", "magnitude", "random")


def test_patterns_refuse_nonsense() -> None:
    for kind in (Unstructured, PerRow):
        for sparsity in (-0.1, 1.5, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=r"sparsity=.* is outside"):
                kind(sparsity)
        for wrong in ("0.5", True, None):
            with pytest.raises(TypeError, match="sparsity must be"):
                kind(wrong)  # type: ignore[arg-type]
    for n, m in ((0, 4), (4, 4), (5, 4), (-1, 2)):
        with pytest.raises(ValueError, match="is not a pattern"):
            NByM(n, m)
    with pytest.raises(TypeError, match="m must be an int"):
        NByM(2, 4.0)  # type: ignore[arg-type]
    for number in (4.0, True, "4"):
        with pytest.raises(TypeError, match="size must be an int"):
            Block(number, 0.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="dim must be an int"):
            Channels(0.5, number)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size=0 is less than 1"):
        Block(0, 0.5)


def with_other_pattern(rank: int) -> None:
    prune_blocks(tiny_model("llama"), TOKENS, method="wanda", pattern=Unstructured(0.5 + rank / 10))


def with_other_samples(rank: int) -> None:
    prune_blocks(tiny_model("llama"), TOKENS[: 3 + rank], method="wanda", pattern=HALF)


def with_failing_callback(rank: int) -> None:
    def on_block(_: int, __: BlockReport) -> None:
        if rank == 1:
            raise OSError("no space left")

    prune_blocks(tiny_model("llama"), TOKENS, method="wanda", pattern=HALF, on_block=on_block)


def message_on(pool: ProcessPool, fn: Any) -> str:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        pool.run(2, fn)
    return str(raised.value)


def test_ranks_that_disagree(pool: ProcessPool) -> None:
    assert "pattern: " in message_on(pool, with_other_pattern)
    assert "samples: " in message_on(pool, with_other_samples)
    assert "no space left" in message_on(pool, with_failing_callback)


def test_nan_in_activations_names_block_and_layer() -> None:
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = torch.nan
    with pytest.raises(ValueError, match=r"block 'model.layers.1': NaN or Inf in the inputs of 'self_attn.q_proj'"):
        prune_blocks(model, TOKENS, method="wanda", pattern=HALF)


def test_new_weights_that_overflow_are_refused() -> None:
    """In the last block, too, whose outputs nobody looks at."""
    model: Any = tiny_model("llama").half()
    linear = model.model.layers[2].mlp.down_proj
    with torch.no_grad():
        linear.weight.copy_(torch.where(linear.weight > 0, 65000.0, -65000.0))
    with pytest.raises(ValueError, match=r"the new weights of 'model.layers.2.mlp.down_proj' are NaN or inf"):
        prune_blocks(model, TOKENS, method="sparsegpt", pattern=HALF)


def with_new_weights_that_overflow(_: int) -> None:
    model: Any = tiny_model("llama").half()
    linear = model.model.layers[0].mlp.down_proj
    with torch.no_grad():
        linear.weight.copy_(torch.where(linear.weight > 0, 65000.0, -65000.0))
    prune_blocks(sharded(model), TOKENS, method="sparsegpt", pattern=HALF)


def test_new_weights_that_overflow_on_one_rank_are_refused_on_all() -> None:
    errors = run_threads(2, with_new_weights_that_overflow, catch=True)
    assert all(
        "the new weights of 'model.layers.0.mlp.down_proj' are NaN or infinite" in str(error) for error in errors
    )


def sweep_in_rounds(_: int, architecture: str) -> list[int]:
    report = prune_blocks(sharded(tiny_model(architecture)), TOKENS, method="sparsegpt", pattern=HALF)
    return [block.num_rounds for block in report.blocks]


def test_rounds_of_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice for every block of columns of each input."""
    num_rounds = {}
    for columns in (128, 8):
        monkeypatch.setattr("distprune.oneshot.sparsegpt.COLUMNS", columns)
        num_rounds[columns], same = run_threads(2, sweep_in_rounds, "llama")
        assert num_rounds[columns] == same
    first, second, last = num_rounds[128]
    assert first == second == last + 1 <= 100  # behind the last, nothing is run
    assert num_rounds[8][0] > first


def admm_in_rounds(_: int, num_blocks: int, width: int) -> list[int]:
    model = sharded(tiny_model("llama", num_hidden_layers=num_blocks, intermediate_size=width))
    report = prune_blocks(model, TOKENS, method="admm", pattern=HALF, refit="none")
    return [block.num_rounds for block in report.blocks]


@pytest.mark.whole
def test_rounds_layer_by_layer() -> None:
    """As many for every block, but that the first learns the order, and however wide; no more than 40 a stage."""
    (first, *others), _ = run_threads(2, admm_in_rounds, 4, 40)
    assert first - 3 == others[0] == others[1] == others[2] + 1  # behind the last, nothing is run
    assert run_threads(2, admm_in_rounds, 4, 80)[0] == [first, *others]
    assert others[0] <= 2 + 4 * 40


def test_nan_weights_are_refused() -> None:
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 3] = torch.nan
    with pytest.raises(ValueError, match=r"values are NaN in 'model.layers.2.mlp.up_proj.weight'"):
        prune_blocks(model, TOKENS, method="wanda", pattern=HALF)
    assert (model.model.layers[0].mlp.up_proj.weight != 0).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(2)
def test_going_on_after_a_block(method: OneShotMethod) -> None:
    whole, part = tiny_model("llama"), tiny_model("llama")
    states: dict[int, dict[str, torch.Tensor]] = {}
    seen: list[BlockReport] = []

    def on_block(index: int, report: BlockReport) -> None:
        assert report.index == index
        seen.append(report)
        states[index] = copy.deepcopy(whole.state_dict())

    full = prune_blocks(whole, TOKENS, method=method, pattern=HALF, seed=5, on_block=on_block)
    assert list(full.blocks) == seen
    prefix = f"{full.blocks[0].name}."

    def finished(index: int) -> bool:
        if index == 0:
            own = {name: value for name, value in states[0].items() if name.startswith(prefix)}
            part.load_state_dict(own, strict=False)
        return index == 0

    rest = prune_blocks(part, TOKENS, method=method, pattern=HALF, seed=5, finished=finished)
    assert rest.num_parameters is None
    assert [block.layers for block in rest.blocks] == [block.layers for block in full.blocks[1:]]
    for name, value in part.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name])


def test_a_walk_that_goes_on_holds_two_streams() -> None:
    """The pruned one and the dense one, also while it is not known yet whether a block is restored."""
    states: list[dict[str, torch.Tensor]] = []
    whole, part = tiny_model("llama"), tiny_model("llama")
    how: dict[str, Any] = {"method": "admm", "pattern": HALF}
    prune_blocks(whole, TOKENS, on_block=lambda *_: states.append(copy.deepcopy(whole.state_dict())), **how)
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
            part.load_state_dict(states[index])
        return index < 2

    prune_blocks(part, TOKENS, finished=finished, **how)
    assert num_streams[0] == num_streams[1] == num_streams[2] == 2
    for name, value in part.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name])


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
    inputs: dict[str, list[torch.Tensor]] = {}
    block = decoder_blocks(model)[0][1]
    handles = [
        linear.module.register_forward_pre_hook(lambda _, x, name=name: inputs.setdefault(name, []).append(x[0][0]))
        for name, linear in linear_layers(block).items()
    ]
    with torch.no_grad():
        for tokens in TOKENS:
            model(input_ids=tokens[None])
    for handle in handles:
        handle.remove()
    before = {name: linear.parameter.detach().clone() for name, linear in linear_layers(block).items()}
    report = prune_blocks(model, TOKENS, method=method, pattern=HALF, seed=1)
    for of_layer, (name, linear) in zip(report.blocks[0].layers, linear_layers(block).items(), strict=True):
        x = torch.cat(inputs[name]).double()
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


def test_damping_is_raised_until_it_helps() -> None:
    def factor(products: torch.Tensor) -> tuple[torch.Tensor, float]:
        ones = torch.ones(8).double()
        found = SparseGPT().prepare(Moments(("up",), 1, ones, ones, ones, products=products.double()))
        return found["upper"].double(), float(found["damping"])

    products = torch.full((8, 8), 1.0)
    products[0, 1] = products[1, 0] = 1.05  # not positive semidefinite
    upper, fraction = factor(products)
    assert fraction == 10 * DAMPING
    damped = 2 * products.double() + fraction * 2 * torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(upper.t() @ upper @ damped, torch.eye(8).double(), rtol=0, atol=1e-4)
    assert factor(torch.eye(8))[1] == DAMPING


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
