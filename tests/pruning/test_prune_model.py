"""What a call prunes, and what it reports."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from distprune import (
    Geometry,
    LocalShard,
    Ownership,
    PruneReport,
    SparseTraining,
    compute_masks,
    constant,
    prune_model,
    prune_shards,
)
from distprune.collectives.communicator import ProcessGroup
from distprune.pruning.agreement import NamedWeights
from distprune.scores.as_score import ScoreLike
from distprune.scores.base import ElementwiseScore
from distprune.scores.channel_norm import ChannelNorm
from distprune.scores.random import Random
from tests.contract import OwnScore
from tests.decoder import BLOCK_WEIGHTS, decoder
from tests.worlds import ProcessPool, all_raise, drawing, run_threads


def names(report: PruneReport) -> list[str]:
    return [parameter.name for parameter in report.parameters]


def test_patterns_and_modules() -> None:
    model = decoder()

    def chosen(**arguments: Any) -> list[str]:
        return names(prune_model(model, 0.0, **arguments))

    assert chosen(include=["*.up.weight"]) == BLOCK_WEIGHTS[::2]
    assert chosen(include=["*.up.*"], exclude=["*bias"]) == BLOCK_WEIGHTS[::2]
    assert chosen(exclude=["layers.1.*"]) == BLOCK_WEIGHTS[:2]
    assert chosen(include=["layers.?.norm.bias"]) == ["layers.0.norm.bias", "layers.1.norm.bias"]
    assert chosen(include=[model.layers[1]]) == BLOCK_WEIGHTS[2:]
    assert chosen(include=[model.layers], exclude=[model.layers[0]]) == BLOCK_WEIGHTS[2:]


def test_patterns_that_can_be_gone_through_once() -> None:
    model, ups, first = decoder(), BLOCK_WEIGHTS[::2], ["layers.0.*"]
    generator: Any = (name for name in ups)
    mapped: Any = map(str, first)
    weights, expected = NamedWeights(model, generator, mapped), NamedWeights(model, ups, first)
    for _ in range(2):
        assert [shard.name for shard in weights.find().shards] == ups[1:]
        assert weights.facts == expected.facts


def test_a_tied_weight_counts_once_and_goes_by_any_of_its_names() -> None:
    model = decoder()
    report = prune_model(model, 0.5, include=["head.weight", "embed.*"])
    assert names(report) == ["embed.weight"]
    assert report.num_zeros == 44 == int((model.head.weight == 0).sum())
    assert model.head.weight is model.embed.weight


def test_sparsities_by_the_names_of_a_wrapped_model() -> None:
    model = nn.DataParallel(nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4)))
    first, second = (name for name, _ in model.named_parameters() if name.endswith("weight"))
    assert (first, second) == ("module.0._checkpoint_wrapped_module.weight", "module.1.weight")
    with pytest.raises(ValueError, match=r"sparsity names '0.weight' twice, with 0.25 and 0.5"):
        prune_model(model, {first: 0.25, "0.weight": 0.5})
    optimizer, schedule = torch.optim.SGD(model.parameters()), {first: constant(0.25), second: constant(0.5)}
    SparseTraining(model, optimizer, schedule=schedule).remove()
    report = prune_model(model, {first: 0.25, second: 0.5})
    assert {parameter.name: parameter.sparsity for parameter in report.parameters} == {
        "0.weight": 0.25,
        "1.weight": 0.5,
    }


def test_the_report_counts_what_is_there() -> None:
    model = decoder()
    with torch.no_grad():
        model.get_parameter("layers.0.up.weight")[0] = 0
    report = prune_model(model, 0.25, scope="tensor")
    for parameter in report.parameters:
        weight = model.get_parameter(parameter.name).detach()
        assert parameter.num_elements == weight.numel() == 192
        assert parameter.num_zeros == int((weight == 0).sum()) == 48
        assert parameter.num_pruned == (40 if parameter.name == BLOCK_WEIGHTS[0] else 48)
        assert parameter.threshold is not None
        assert parameter.threshold < float(weight[weight != 0].abs().min())
    whole = report.to_dict()
    assert (whole["num_elements"], whole["num_zeros"], whole["num_pruned"]) == (768, 192, 184)
    assert len(whole["parameters"]) == 4
    assert report.masks.sparsity() == 0.25
    sent = pickle.loads(pickle.dumps(report))
    assert sent == report
    with pytest.raises(ValueError, match="pickled without its masks"):
        _ = sent.masks
    assert copy.deepcopy(report).masks.sparsity() == 0.25


def test_a_report_names_the_first_that_is_left_out_for_each_reason() -> None:
    model = nn.ModuleDict({name: nn.Embedding(4, 4) for name in ("first", "second")})
    model["linear"], model["normed"] = nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    lines = str(prune_model(model, 0.5)).splitlines()
    assert lines[-2] == "  left out, an embedding: 2, such as first.weight"
    assert lines[-1].startswith("  left out, under a parametrization: 2, such as normed.parametrizations.weight.orig")


def test_a_report_shows_itself() -> None:
    model = decoder()
    num_all = sum(parameter.numel() for parameter in model.parameters())
    report = prune_model(model, 0.5)
    title, zeros, what, *worst, took = str(report).splitlines()
    assert title == "Unstructured(sparsity=0.5, scope='global') by magnitude"
    assert zeros == f"  sparsity: 50.0 % of 768 prunable weights, {384 / num_all * 100:.1f} % of all {num_all:,}"
    assert what == "  highest sparsities:"
    assert sorted(line.split()[-1] for line in worst) == sorted(BLOCK_WEIGHTS)
    assert re.fullmatch(r"  384 weights newly pruned in \d+\.\d\d s, \d+ rounds and [\d,]+ bytes a rank", took)
    assert report.to_dict()["num_parameters"] == num_all
    shares = {f"{i}.weight": i / 10 for i in range(10)}
    many = nn.ModuleList([nn.Linear(10, 1) for _ in range(10)])
    report = prune_model(many, shares, include="*.weight")
    title, _, _, *worst, _ = str(report).splitlines()
    assert len(title) == 100
    assert [line.split() for line in worst] == [[f"{i}0.0", "%", f"{i}.weight"] for i in (9, 8, 7, 6, 5)]
    assert report.to_dict()["pattern"] == f"Unstructured(sparsity={shares}, scope='tensor')"


@pytest.mark.parametrize("sparsity", [0.5, 0.0])
def test_a_stage_without_blocks_prunes_nothing_by_default(sparsity: float) -> None:
    """One process leaves the norm and the head alone, and so do stages."""

    def on_rank(rank: int) -> tuple[list[str], dict[str, torch.Tensor]]:
        stage = decoder()
        stage.head.weight = nn.Parameter(stage.head.weight.detach().clone())
        for i, part in enumerate(("embed", "layers", "head")):
            if i != rank:
                delattr(stage, part)
        report = prune_model(stage, sparsity)
        return names(report), {name: p.detach() for name, p in stage.named_parameters()}

    alone = decoder()
    wanted = names(prune_model(alone, sparsity))
    stages = run_threads(3, on_rank)
    assert [held for held, _ in stages] == [wanted] * 3
    for _, parameters in stages:
        assert all(torch.equal(value, alone.get_parameter(name)) for name, value in parameters.items())


@pytest.mark.parametrize("n", [1, float("inf"), -float("inf")])
def test_thresholds_of_channels_are_their_scores(n: float) -> None:
    """Also where some weights are far larger than others."""
    model = nn.ParameterList([1e20 * torch.randn(8, 6), torch.randn(8, 6)])
    expected = []
    for weight in model:
        sizes = weight.detach().double().abs()
        scores = {1: sizes.sum(1), float("inf"): sizes.amax(1)}.get(n, sizes.amin(1))
        expected.append(float(scores.sort().values[3]))
    report = prune_model(model, 0.5, score=ChannelNorm(n), pattern="channels:0", include="*")
    assert [parameter.threshold for parameter in report.parameters] == pytest.approx(expected, rel=1e-9)


def test_ranks_that_hold_different_parameters_tell_each_other() -> None:
    def on_rank(rank: int) -> list[tuple[int, list[str]]]:
        first, other = (nn.ModuleDict({f"{kind}{rank}": nn.Linear(8, 4)}) for kind in "ab")
        found = []
        for model in (first, other if rank else first):
            comm = ProcessGroup()
            agreed = NamedWeights(model).agree(comm)
            found.append((comm.traffic.num_rounds, [m.name for m in agreed.roster.members]))
        return found

    both = run_threads(2, on_rank, draws=True)
    assert both == [[(5, ["a0.weight", "a1.weight"]), (5, ["a0.weight", "b1.weight"])]] * 2


def test_rounds_of_the_whole_call() -> None:
    alone = prune_model(decoder(), 0.5)
    assert alone.num_rounds == 1 + 2 + 1  # agree, two digits, count zeros
    assert alone.num_bytes < 64 + 2 * (512 << 10) + (8 + 16 * 4 + 8)
    assert prune_model(decoder(), 0.5, scope="tensor").num_rounds == 5


def pruned_without_seed(rank: int) -> tuple[int | None, list[int], float]:
    torch.manual_seed(7)
    torch.rand(rank)  # out of step: the first rank's draw counts
    model = decoder()
    report = prune_model(model, 0.5, score="random", seed=None)
    torch.manual_seed(7)
    prune_model(decoder(), 0.5, score=Random(), seed=None)  # in step: so they are afterwards
    return (
        report.seed,
        model.get_parameter("layers.1.up.weight").flatten().nonzero().flatten().tolist(),
        float(torch.rand(())),
    )


def test_no_seed_takes_the_first_ranks_and_leaves_generators_in_step(pool: ProcessPool) -> None:
    first, second = pool.run(2, pruned_without_seed)
    assert first == second
    assert first[0] is not None


def test_whose_seed_counts() -> None:
    cases: list[tuple[ScoreLike, dict[str, int], int]] = [
        ("random", {}, 0),
        ("random", {"seed": 3}, 3),
        (Random(), {"seed": 3}, 3),
        (Random(7), {}, 7),
    ]
    for score, options, seed in cases:
        assert prune_model(nn.Linear(4, 4), 0.5, score=score, **options).seed == seed  # type: ignore[arg-type]


def test_parameters_that_are_not_contiguous() -> None:
    torch.manual_seed(0)
    values = torch.randn(300, 700)
    turned, straight = (nn.ParameterList([weight]) for weight in (values.t(), values.t().clone()))
    assert not turned[0].is_contiguous()
    for score, sparsity in (("magnitude", 0.3), ("random", 0.5)):
        for model in (turned, straight):
            prune_model(model, sparsity, score=score, seed=1, include="*")
        assert torch.equal(turned[0], straight[0])


@pytest.mark.parametrize("score", [OwnScore, lambda: lambda w: w**2, lambda: ElementwiseScore(lambda w: w**2)])
def test_ranks_with_scores_of_their_own_agree(score: Callable[[], ScoreLike]) -> None:
    """Each rank makes its own, at another place in memory, as in separate processes."""

    def prune(rank: int) -> int:
        del rank
        layer = nn.Linear(4, 4)
        layer.weight = nn.Parameter(torch.arange(16.0).view(4, 4) - 20)
        return prune_model(layer, 0.5, score=score()).num_zeros

    assert run_threads(2, prune, draws=True) == [8, 8]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 3), (2, 4)], "own 10:"),  # a row twice
        ([(0, 2), (0, 2)], "own 8, some of them twice:"),  # as many as there are, in wrong places
        ([(0, 3), (1, 2)], "own 8, some of them twice:"),
        ([(0, 1), (2, 4)], "own 6:"),  # a row that nobody owns
        ([(0, 4), (0, 4)], "own 16:"),
    ],
)
@pytest.mark.parametrize("pattern", ["unstructured", "row", "1:2", "block:2", "channels:0"])
def test_every_element_has_one_owner(rows: list[tuple[int, int]], said: str, pattern: str) -> None:
    held = [torch.ones(stop - start, 2) for start, stop in rows]

    def on_rank(rank: int) -> None:
        shard = LocalShard("w", held[rank], Geometry.rows((4, 2), *rows[rank]), Ownership())
        prune_shards([shard], None if pattern == "1:2" else 0.5, pattern=pattern)

    all_raise(2, on_rank, kind=ValueError, match=f"of the 8 elements of 'w' the ranks {said}")
    assert all(bool(part.all()) for part in held)


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "row", "block:2", "channels:0"])
@pytest.mark.parametrize("shape", [(4, 0), (0, 4)])
def test_of_a_parameter_without_elements_nothing_is_pruned(shape: tuple[int, int], pattern: str) -> None:
    def on_rank(rank: int) -> int:
        shards = []
        for name, whole in (("empty", shape), ("w", (4, 4))):
            num = whole[0] // 2
            place = Geometry.rows(whole, rank * num, (rank + 1) * num)
            shards.append(LocalShard(name, torch.ones(num, whole[1]), place, Ownership()))
        return prune_shards(shards, None if pattern == "2:4" else 0.5, pattern=pattern).num_zeros

    assert run_threads(2, on_rank) == [8, 8]


def test_pruned_weights_are_plus_zero_whatever_else_their_rank_prunes() -> None:
    weights = torch.tensor([[-0.0, -0.0, 1.0, 2.0], [1.0, 2.0, 3.0, 4.0]])

    def on_rank(rank: int) -> torch.Tensor:
        row = weights[rank : rank + 1].clone()
        place = Geometry.rows((2, 4), rank, rank + 1)
        prune_shards([LocalShard("w", row, place, Ownership())], pattern="2:4")
        return row

    assert not torch.cat(run_threads(2, on_rank))[:, :2].signbit().any()


@pytest.mark.parametrize("pattern", ["unstructured", "2:4", "row", "block:2", "channels:0"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_are_pruned_as_the_same_numbers_in_float32(dtype: torch.dtype, pattern: str) -> None:
    models = [nn.Linear(16, 8, bias=False) for _ in range(2)]
    with drawing(0):
        weight = torch.randn(8, 16).to(dtype)
    for model, values in zip(models, (weight, weight.float()), strict=True):
        model.weight = nn.Parameter(values, requires_grad=False)
        prune_model(model, None if pattern == "2:4" else 0.5, pattern=pattern)
    assert torch.equal(models[0].weight.float(), models[1].weight)
    assert models[0].weight.dtype == dtype


def test_backward_through_weights_that_were_pruned_since_is_an_error() -> None:
    """As after any change in place: the gradient would be of other weights."""
    layer = nn.Linear(32, 32)
    loss = layer.weight.square().sum()
    prune_model(layer, 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, layer.weight)


@pytest.mark.parametrize("pattern", ["unstructured", "row", "channels:0"])
def test_a_model_is_let_go_of_at_once(pattern: str) -> None:
    """A call leaves no cycle behind, which would keep the weights until Python looks for some."""
    model = nn.Linear(4, 4)
    weight = weakref.ref(model.weight)
    gc.disable()
    try:
        prune_model(model, 0.5, pattern=pattern)
        del model
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_pythons_collector_is_as_it_was(was_enabled: bool) -> None:
    """Also where a call fails."""

    def score(weights: torch.Tensor) -> torch.Tensor:
        assert not gc.isenabled()
        return weights

    try:
        if not was_enabled:
            gc.disable()
        prune_model(nn.Linear(4, 4), 0.5, score=score)
        assert gc.isenabled() is was_enabled
        with pytest.raises(ValueError, match="sparsity"):
            compute_masks(nn.Linear(4, 4), 2.0)
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


def test_gradients_and_identity_stay() -> None:
    model = decoder()
    before = dict(model.named_parameters())
    prune_model(model, 0.5)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())
    assert not [key for key in model.state_dict() if "mask" in key]
