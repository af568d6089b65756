"""What one-shot pruning says, refuses and resumes, and what it takes of memory."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

from distprune import NByM, Unstructured, prune_blocks
from distprune.collectives.agree import together
from distprune.collectives.communicator import communicator
from distprune.models.decoder_blocks import decoder_blocks
from distprune.models.find_shards import count_parameters
from distprune.models.linear_layers import linear_layers
from distprune.oneshot import prune_blocks as prune_blocks_module
from distprune.oneshot.estimate import as_line, estimate
from distprune.oneshot.recipe import OneShotMethod, Recipe
from distprune.oneshot.report import BlockReport
from tests.architectures import samples, tiny_model
from tests.device_path import Memory
from tests.oneshot.alike import sharded
from tests.oneshot_oracle import listening
from tests.sampling import only_whole
from tests.worlds import all_raise, run_threads

TOKENS = samples(4)
HALF = Unstructured(0.5)
METHODS: tuple[OneShotMethod, ...] = ("wanda", "sparsegpt", "admm", "magnitude", "random")


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


SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 768},
    "mixtral": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
}
ONE_EXPERT = 16 * 256**2  # bytes of its sums and what leads to the targets


def small(architecture: str) -> Any:
    return tiny_model(
        architecture, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, **SIZES[architecture]
    )


@pytest.mark.parametrize(
    ("architecture", "num_windows", "how"),
    [
        only_whole("llama", 8, {"method": "sparsegpt"}),
        ("llama", 32, {"method": "admm", "refit": "none"}),
        ("llama", 8, {"method": "admm"}),
        ("mixtral", 8, {"method": "admm"}),
        only_whole("mixtral", 8, {"method": "admm", "refit": "none"}),
        ("mixtral", 8, {"method": "admm", "refit": "none", "expert_memory": 3 * ONE_EXPERT}),
        only_whole("mixtral", 8, {"method": "admm", "refit": "none", "expert_memory": 1}),
    ],
)
def test_near_to_what_is_measured(architecture: str, num_windows: int, how: dict[str, Any]) -> None:
    model, windows = small(architecture), samples(num_windows, 64)
    waves = {name: how[name] for name in how if name == "expert_memory"}
    recipe = Recipe(pattern="2:4", **{name: how[name] for name in how if name not in waves}).resolved()
    terms = estimate(model, recipe, num_windows, 64, **waves)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with Memory() as memory:
        prune_blocks(model, windows, pattern="2:4", **how)
    assert sum(terms.values()) == pytest.approx(weights + memory.peak, rel=0.15), (terms, memory.peak)


def test_ranks_share_what_grows_with_windows() -> None:
    model, recipe = small("llama"), Recipe(pattern="2:4").resolved()
    one, four = (estimate(model, recipe, 16, 64, num_ranks) for num_ranks in (1, 4))
    for name in ("shard of the weights", "hidden states", "inputs of a block"):
        assert one[name] == 4 * four[name]
    assert (one["gathered block"], four["gathered block"] > 0) == (0, True)


@pytest.mark.parametrize(
    ("num_ranks", "error"),
    [(1, MemoryError()), (2, torch.OutOfMemoryError("CUDA out of memory.")), (1, ValueError("another"))],
)
def test_named_where_memory_runs_out(num_ranks: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank: all are told how much the walk takes, and ways out."""

    def runs_out(*_: Any, **__: Any) -> None:
        with together(comm := communicator()):
            if comm.rank == comm.size - 1:
                raise error

    def on_rank(_: int) -> None:
        prune_blocks(tiny_model("llama"), windows, pattern="2:4")

    monkeypatch.setattr(prune_blocks_module, "run_blocks", runs_out)
    windows = samples(3)
    terms = estimate(tiny_model("llama"), Recipe(pattern="2:4").resolved(), 3, 16, num_ranks)
    for raised in run_threads(num_ranks, on_rank, catch=True):
        assert str(error) in str(raised)
        assert isinstance(raised, RuntimeError | type(error))
        notes: list[str] = getattr(raised, "__notes__", ["", ""])
        takes, ways_out = notes[-2:]
        is_told = not isinstance(error, ValueError)
        assert (takes == f"the walk takes {as_line(terms)}") == is_told
        assert ways_out.startswith("Ways out: fewer samples, more ranks, offload=True, refit='none'") == is_told


def test_offload_changes_nothing() -> None:
    one, other = tiny_model("gpt2"), tiny_model("gpt2")
    prune_blocks(one, TOKENS, method="sparsegpt", pattern=HALF)
    prune_blocks(other, TOKENS, method="sparsegpt", pattern=HALF, offload=True)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
