"""Zeros that a hold has not written: of both signs, or there by nature."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.nn.utils import parametrize

import distprune as prune
from distprune.training.hold import hold_zeros
from tests.training.optimizers import INCLUDE, NUM_RANKS, held_bits, targets
from tests.training.test_hold import made, train
from tests.worlds import ProcessPool, drawing
from tests.wrapped import batches, pairs_of, transformer, wrap


def foreign_zeros_on_rank(_: int, layout: str) -> None:
    """What a product with a mask has pruned, before the hold is made; ours prunes to no more than that."""
    wrapped = made(layout)
    model, optimizer = wrapped.model, torch.optim.SGD(wrapped.model.parameters(), lr=0.1, momentum=0.9)
    prune.prune_model(model, 0.5, include=INCLUDE)
    before = held_bits(model)
    if layout in NUM_RANKS_TORCH_API:
        for module, name in pairs_of(model):
            prune.custom_from_mask(module, name, getattr(module, name) != 0)
            prune.remove(module, name)
    for shard in targets(model):
        shard.local[shard.local == 0] = -0.0
    hold_zeros(model, optimizer, include=INCLUDE)
    for tokens in batches(3):
        train(optimizer, wrapped, tokens)
    assert all(map(torch.equal, held_bits(model), before))


NUM_RANKS_TORCH_API = [name for name in NUM_RANKS if "fsdp1" not in name and name != "pipeline"]


@pytest.mark.parametrize("layout", NUM_RANKS)
@pytest.mark.sampled(4)
def test_zeros_of_both_signs_are_held_that_others_have_pruned(pool: ProcessPool, layout: str) -> None:
    pool.run(NUM_RANKS[layout], foreign_zeros_on_rank, layout)


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("method", [prune, torch.nn.utils.prune])
def test_what_was_removed_is_held(kind: Callable[[int, int], nn.Module], method: Any) -> None:
    with drawing(0):
        module, x = kind(8, 8), torch.randn(4, 8)
    names = [name for name, parameter in module.named_parameters() if parameter.ndim == 2]
    for name in names:
        method.l1_unstructured(module, name, 0.5)
        module(x)
        method.remove(module, name)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    hold = hold_zeros(module, optimizer, include=names)
    for _ in range(3):
        out = module(x)
        (out if isinstance(out, torch.Tensor) else out[0]).square().sum().backward()
        optimizer.step()
    assert hold.counts().sparsity == prune.sparsity(module, include=names) == 0.5


def test_what_is_removed_during_a_sparse_training_is_held() -> None:
    with drawing(0):
        model, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
    prune.l1_unstructured(model, "weight", 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prune.SparseTraining(model, optimizer, schedule=lambda _: 0.5)
    for is_last in (False, True):
        if is_last:
            prune.remove(model, "weight")
        model(x).square().sum().backward()
        optimizer.step()
    assert prune.sparsity(model) == 0.5


def test_a_state_of_others_is_loaded() -> None:
    """Their zeros have both signs, and are others than those that are held."""
    with drawing(0):
        model, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8)
        state = {"weight": torch.randn(8, 8) * (torch.rand(8, 8) < 0.4)}
    prune.prune_model(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hold_zeros(model, optimizer)
    model.load_state_dict(state)
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
    assert torch.equal(model.weight == 0, state["weight"] == 0)


def test_a_state_of_before_is_loaded_after_regrowth() -> None:
    """Its signs speak: it is from the same training."""
    with drawing(0):
        model = nn.Linear(16, 16, bias=False)
    prune.prune_model(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hold = hold_zeros(model, optimizer)
    with torch.no_grad():
        model.weight[model.weight > 0] = -0.0  # kept
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    before, state = hold.counts(), {"weight": model.weight.detach().clone()}
    hold.regrow(0.2, seed=1)
    model.load_state_dict(state)
    assert hold.counts() == before
    assert before.sparsity == 0.5


def _moved(model: nn.Module) -> None:
    model.get_parameter("weight").data = model.get_parameter("weight").data.clone()


@pytest.mark.parametrize("before", [lambda _: None, _moved, lambda model: model.load_state_dict(model.state_dict())])
def test_what_grows_before_anything_is_read_learns(before: Callable[[nn.Module], object]) -> None:
    model = nn.Linear(8, 8, bias=False)
    prune.prune_model(model, 0.5)
    hold = hold_zeros(model, torch.optim.SGD(model.parameters()))
    before(model)
    hold.regrow(0.5, seed=0)
    assert hold.counts().sparsity == 0.5


def test_what_grows_at_the_first_step_of_a_schedule_learns() -> None:
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moves = prune.Regrow(stop=9, every=2)
    training = prune.SparseTraining(model, optimizer, schedule=prune.at_once(0.5, step=2), regrow=moves)
    for _ in range(4):
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
    assert training.updates[-1].num_moved > 0
    assert training.hold.counts().sparsity == 0.5


def test_what_is_computed_from_another_parameter_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    prune.prune_model(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hold_zeros(model, optimizer)
    parametrize.register_parametrization(model[0], "weight", nn.Identity())
    model(torch.ones(8)).sum().backward()
    with pytest.warns(UserWarning, match=r"'0\.weight' \(1 parameters\) are held at zero no more"):
        optimizer.step()


def natural_on_rank(_: int, layout: str) -> None:
    """Half of the zeros of a unit matrix lie on each rank: no rank judges by its own part."""
    model = transformer()
    for i in range(2):
        nn.init.eye_(model.get_parameter(f"layers.{i}.attention.q.weight"))
    wrapped = wrap(layout, model)
    with pytest.warns(UserWarning, match=r"'layers.0.attention.q.weight', .* \(2 parameters\) are mostly zeros"):
        hold_zeros(wrapped.model).remove()
    hold_zeros(wrapped.model, exclude="*attention.q*").remove()


def warned_on_rank(rank: int) -> None:
    model = nn.Linear(64, 64)
    nn.init.eye_(model.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if rank == 1 else "ignore")
        with pytest.raises(UserWarning if rank == 1 else RuntimeError, match="mostly zeros"):
            hold_zeros(model)


def test_a_warning_that_is_an_error_on_one_rank(pool: ProcessPool) -> None:
    pool.run(2, warned_on_rank)


@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp-tp"])
@pytest.mark.sampled(3)
def test_zeros_that_nobody_has_pruned_are_named(pool: ProcessPool, layout: str) -> None:
    pool.run(NUM_RANKS[layout], natural_on_rank, layout)
