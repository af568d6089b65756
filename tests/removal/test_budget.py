"""A budget is divided as trying all sizes would, counted as what is cut, and measured as the real thing is."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from distprune import shrink_model
from distprune.removal import trials
from distprune.removal.choose_units import choose_units
from distprune.removal.layers import order_layers
from distprune.removal.shrink_model import cut_model
from distprune.removal.sizes import Budget, Sizes
from distprune.removal.trials import cost_curve, divide_budget
from tests.architectures import samples, tiny_model
from tests.removal.layouts import LAYOUTS
from tests.worlds import run_threads

HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = samples(6)


@pytest.mark.parametrize("seed", range(20))
def test_the_division_is_the_best_of_all(seed: int) -> None:
    """Against all combinations, counted plainly: layers of unlike sizes, costs that may be equal."""
    chance = random.Random(seed)
    num_layers, sizes = 4, {"mlp": 12, "heads": 6, "kv_groups": 3, "layers": 4}
    of_unit = {kind: [chance.randint(1, 9) for _ in range(num_layers)] for kind in ("mlp", "heads", "kv_groups")}
    inside = [200 + chance.randint(0, 50) for _ in range(num_layers)]
    step = {"mlp": 1, "heads": 2, "kv_groups": 1, "layers": 1}
    divided = [kind for kind in sizes if chance.random() < 0.8] or ["mlp"]
    possible = {kind: range(sizes[kind] - step[kind], 0, -step[kind]) for kind in divided}
    options: Any = {
        kind: {size: [(sizes[kind] - size) * n for n in of_unit[kind]] if kind != "layers" else [] for size in of}
        for kind, of in possible.items()
    }
    costs = {kind: sorted(chance.randint(0, 6) for _ in of) for kind, of in possible.items()}

    def cost(chosen: dict[str, Any]) -> int:
        return sum(costs[kind][possible[kind].index(size)] for kind, size in chosen.items())

    def num_left(chosen: dict[str, Any]) -> int:
        gone = {kind: sizes[kind] - size for kind, size in chosen.items() if kind != "layers"}
        blocks = [num - sum(gone[kind] * of_unit[kind][i] for kind in gone) for i, num in enumerate(inside)]
        return 30 + int(sum(sorted(blocks)[num_layers - chosen.get("layers", num_layers) :]))

    mixes = (
        zip(divided, tried, strict=True) for tried in itertools.product(*([None, *of] for of in possible.values()))
    )
    every = [{kind: size for kind, size in mix if size is not None} for mix in mixes]
    every = [chosen for chosen in every if not {"heads", "kv_groups"} <= chosen.keys()]
    limit = num_left(chance.choice(every))
    budget = Budget(limit, 30, inside, num_layers, options)
    assert [budget.left(chosen) for chosen in every] == [num_left(chosen) for chosen in every]
    assert all(budget.is_met(mix) for mix in budget.mixes())
    assert min(map(cost, budget.mixes())) == min(cost(chosen) for chosen in every if num_left(chosen) <= limit)


@pytest.mark.parametrize(
    ("points", "costs"),
    [
        ([(100, 0.5)], {0: 0, 100: 0.5, 400: 4}),  # the power 1.5
        ([(200, 2.0), (100, 0.5)], {0: 0, 50: 0.125, 100: 0.5, 200: 2, 400: 8}),  # 2
        ([(100, 0.5), (200, 0.25)], {0: 0, 100: 0.125, 200: 0.25, 400: 0.5}),  # 1 is the least
        ([(100, 1.0), (400, 99.0)], {100: 99 / 32, 400: 99}),  # 2.5 is the greatest
        ([(100, -0.5)], {100: 1e-3}),
    ],
)
def test_costs_of_other_sizes(points: list[tuple[int, float]], costs: dict[int, float]) -> None:
    cost = cost_curve(points)
    assert {number: cost(number) for number in costs} == pytest.approx(costs)


# Architecture, what is changed in its configuration, what is asked for besides, and what is chosen.
COUNTED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("llama", {**HEADS, "tie_word_embeddings": True}, {"layers": 2}, {"mlp": 32, "heads": 2}),
    ("gpt2", {}, {}, {"mlp": 48, "layers": 1}),
    ("opt", {}, {"mlp": 0.5}, {"layers": 1}),
    ("mixtral", HEADS, {"experts": 3}, {"mlp": 32, "kv_groups": 1, "layers": 1}),
    ("qwen2_moe", HEADS, {}, {"mlp": 0.5, "heads": 2}),
]


@pytest.mark.parametrize(("architecture", "sizes", "said", "chosen"), COUNTED)
def test_what_is_counted_is_what_such_a_model_has(
    architecture: str, sizes: dict[str, Any], said: dict[str, Any], chosen: dict[str, Any]
) -> None:
    model = tiny_model(architecture, **sizes)
    budget = Budget.of(model, Sizes(**said, parameters=0.9))
    assert chosen.keys() <= budget.options.keys()
    how: dict[str, Any] = {"criterion": "magnitude", "refit": "none", "layer_criterion": "influence"}
    assert budget.left(chosen) == shrink_model(model, TOKENS, **said, **chosen, **how).num_parameters


def find_on_rank(_: int, layout: str) -> dict[str, list[int | float]]:
    sizes = {"intermediate_size": 27, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 2}
    budget = Budget.of(LAYOUTS[layout](tiny_model("llama", **sizes)), Sizes(parameters=0.9))
    return {kind: list(options) for kind, options in budget.options.items()}


def test_sizes_are_those_that_the_layout_can_have() -> None:
    assert find_on_rank(0, "plain") == {"mlp": list(range(26, 0, -1)), "heads": [2, 1], "layers": [1]}
    assert run_threads(3, find_on_rank, "tp") == [{"mlp": list(range(24, 0, -3)), "layers": [1]}] * 3


def plain_loss(model: Any, windows: torch.Tensor) -> float:
    """Return the mean loss, window by window."""
    with torch.no_grad():
        losses = [model(input_ids=one[None], labels=one[None], use_cache=False).loss for one in windows]
    return float(torch.stack(losses).double().mean())


def test_trials_measure_what_is_lost_and_put_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with biases; each trial against the smaller model, and its loss on the windows held out."""
    monkeypatch.setattr(trials, "_PIECE", 5)
    model: Any = tiny_model("opt", num_hidden_layers=4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sizes = Sizes(parameters=0.7)
    budget = Budget.of(model, sizes)
    choose = partial(choose_units, model, refit="least_squares")
    order: Any = partial(order_layers, model, TOKENS, criterion="influence")
    made: dict[str, Any] = {}
    told: list[str] = []

    def recall(name: str, make: Callable[[], Any]) -> Any:
        if name not in made:
            made[name] = json.loads(json.dumps(make()))
        return made[name]

    how: Any = {"recall": recall, "say": told.append}
    division = divide_budget(model, TOKENS, sizes, budget, choose, order, **how)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {kind for trial in division.trials for kind in trial.sizes} == {"mlp", "layers"}
    mixes = [trial for trial in division.trials if budget.left(trial.sizes) <= budget.limit]
    assert 1 < len(mixes) <= 3
    assert division.sizes == Sizes(**min(mixes, key=lambda trial: trial.cost).sizes)
    assert [said.split(": ", 1)[1] for said in told] == [str(trial) for trial in division.trials]
    assert told[1].startswith("trial 2 of at most 6: ")
    held_out, fitted = TOKENS[3:4], TOKENS[[0, 1, 2, 4, 5]]
    scored = held_out, held_out[:, :15].reshape(3, 5)
    dense = [plain_loss(model, windows) for windows in scored]
    found = set[int]()
    for trial in division.trials:
        smaller: Any = tiny_model("opt", num_hidden_layers=4)
        gone = division.layers_gone[: 4 - int(trial.sizes.get("layers", 4))]
        layers = [layer for layer in range(4) if layer not in gone]
        units: Any = {kind: size for kind, size in trial.sizes.items() if kind != "layers"}
        cut_model(smaller, choose_units(smaller, fitted, units, layers=layers, refit="least_squares").kept, layers)
        costs = [plain_loss(smaller, windows) - before for windows, before in zip(scored, dense, strict=True)]
        assert max(costs) == pytest.approx(trial.cost, abs=1e-5)
        found.add(costs.index(max(costs)))
        assert sum(p.numel() for p in model.parameters()) - trial.num_removed == sum(
            p.numel() for p in smaller.parameters()
        )
    assert found == {0, 1}
    del made["trial-2"], made[f"trial-{len(division.trials)}"]
    num_told = len(told)
    assert divide_budget(model, TOKENS, sizes, budget, choose, order, **how) == division
    assert told[num_told:] == [told[1], told[num_told - 1]]


def test_pieces_begin_as_all_windows_do() -> None:
    windows = torch.arange(8 * 70).view(8, 70)
    (whole, pieces), size = trials._split(windows)[1], 32
    assert torch.equal(pieces, whole[:, : 2 * size].reshape(-1, size))
    windows[:, 0] = 1
    whole, pieces = trials._split(windows)[1]
    assert (pieces[:, 0] == 1).all()
    assert torch.equal(pieces[:, 1:], whole[:, 1 : 2 * size - 1].reshape(-1, size - 1))


@pytest.mark.parametrize("extra", [0.0, 0.1, 9.0])
@pytest.mark.sampled(1)
def test_what_costs_more_together_is_found_out(monkeypatch: pytest.MonkeyPatch, extra: float) -> None:
    """Costs are made up: ``extra`` is that of heads, by far the cheapest, where others leave too."""
    model: Any = tiny_model("llama", num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=6)
    sizes = Sizes(parameters=0.6)
    budget = Budget.of(model, sizes)
    tried: list[dict[str, int]] = [{}]

    def choose(*arguments: Any, layers: list[int]) -> None:
        tried.append(arguments[1] | ({"layers": len(layers)} if len(layers) < 6 else {}))

    def made_up(*_: Any, **__: Any) -> float:
        wanted = tried[-1]
        shares = {kind: budget.removed({kind: size}) / budget.limit for kind, size in wanted.items()}
        price = {"mlp": 3.0, "heads": 0.1, "layers": 2.9}
        alone = sum(price[kind] * math.pow(share, 1.5) for kind, share in shares.items())
        return math.exp(5 + alone + extra * (wanted.keys() > {"heads"}))

    monkeypatch.setattr(trials, "perplexity", made_up)
    given: Any = choose, partial(order_layers, model, TOKENS, criterion="influence")
    division = divide_budget(model, TOKENS, sizes, budget, *given, recall=lambda _, make: make(), say=len)
    mixes = division.trials[-3:]
    assert mixes[0].sizes.keys() == {"mlp", "heads", "layers"}
    best = min(mixes, key=lambda trial: trial.cost)
    assert division.sizes == Sizes(**best.sizes)
    assert ("heads" in best.sizes) == (extra < 9)
    assert len(division.trials) <= 9


def small() -> Any:
    return tiny_model("llama", **HEADS, num_hidden_layers=2)


def divide_on_rank(_: int, layout: str, asked: dict[str, Any]) -> tuple[Any, ...]:
    model = LAYOUTS[layout](small())
    shrunk = shrink_model(model, TOKENS, **asked, layer_criterion="influence")
    assert shrunk.division is not None
    trials = [(trial.sizes, trial.num_removed, round(trial.cost, 4)) for trial in shrunk.division.trials]
    return shrunk.division.sizes, trials, shrunk.layers, shrunk.num_parameters


@pytest.mark.parametrize(
    ("asked", "worlds"),
    [
        ({"parameters": 0.7}, [(3, "root")]),
        ({"parameters": 0.7, "heads": 2}, [(2, "tp"), (4, "hsdp")]),
    ],
)
@pytest.mark.sampled(1)
def test_ranks_divide_as_one_does(asked: dict[str, Any], worlds: list[tuple[int, str]]) -> None:
    expected = divide_on_rank(0, "plain", asked)
    sizes, _, _, num_parameters = expected
    assert num_parameters <= 0.7 * sum(parameter.numel() for parameter in small().parameters())
    assert sizes.parameters is None
    for kind, size in asked.items():
        assert kind == "parameters" or getattr(sizes, kind) == size
    for world_size, layout in worlds:
        assert run_threads(world_size, divide_on_rank, layout, asked) == [expected] * world_size
