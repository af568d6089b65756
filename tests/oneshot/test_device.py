"""The code for devices, on CPU tensors: one-shot pruning to the same bits, and no wait for a single matrix."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import distprune as prune
from distprune.calibration.moments import Moments
from distprune.collectives.communicator import Alone
from distprune.oneshot.admm import ADMM
from distprune.oneshot.driver import prune_rows
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.retarget import Aim
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Scored, Solver
from distprune.oneshot.sparsegpt import SparseGPT
from distprune.scores.as_score import Wanda
from tests.architectures import samples, tiny_model
from tests.device_path import Waits, as_on_a_device, counted_waits
from tests.oneshot.alike import matrices

NUM_IN, NUM_OUT = 16, 12
SOLVERS: dict[str, Solver] = {"admm": ADMM(), "sparsegpt": SparseGPT(), "wanda": Scored(Wanda(), by_row=True)}


@pytest.mark.parametrize("pattern", ["row", "2:4", "unstructured", "block:4"])
@pytest.mark.parametrize("method", ["admm", "sparsegpt", "wanda"])
@pytest.mark.sampled(3)
def test_a_model_is_pruned_to_the_same_bits(method: Any, pattern: str) -> None:
    here, there = tiny_model("llama", num_hidden_layers=1), tiny_model("llama", num_hidden_layers=1)
    sparsity = None if pattern == "2:4" else 0.5
    for model, where in ((here, nullcontext()), (there, as_on_a_device())):
        with where:
            how: dict[str, Any] = {"method": method, "pattern": pattern, "sparsity": sparsity, "refit": "none"}
            prune_blocks(model, samples(2), **how, group=Alone())
    for name, weight in matrices(here).items():
        assert torch.equal(matrices(there)[name], weight), name


def made(num_inputs: int) -> tuple[dict[str, Rows], list[Moments]]:
    """Return layers with an input of their own each, and targets."""
    generator = torch.Generator().manual_seed(0)
    rows: dict[str, Rows] = {}
    moments: list[Moments] = []
    for i in range(num_inputs):
        weight, x = (torch.randn(num, NUM_IN, generator=generator) for num in (NUM_OUT, 64))
        rows[f"l{i}"] = Rows(weight, ((0, NUM_OUT),), NUM_OUT, owned=True, name=f"block.l{i}")
        x, shift = x.double(), torch.randn(NUM_IN, NUM_IN, generator=generator)
        of_features = x.square().sum(0), x.mean(0), x.abs().mean(0)
        moments.append(Moments((f"l{i}",), 64, *of_features, products=x.t() @ x, shift=shift))
    return rows, moments


def solve(solver: Solver, rows: dict[str, Rows], moments: list[Moments], pattern: prune.Pattern) -> None:
    prune_rows(Alone(), rows, moments, lambda _: nullcontext(), Aim(), solver=solver, pattern=pattern)


def waits_of(solver: Solver, pattern: prune.Pattern, num_inputs: int, chunk: int) -> Waits:
    rows, moments = made(num_inputs)
    with pytest.MonkeyPatch.context() as patch, as_on_a_device(chunk), counted_waits() as waits:
        patch.setattr("distprune.oneshot.rows._ON_DEVICE", chunk)
        patch.setattr("distprune.calibration.moments._DEVICE_CHUNK", chunk)
        solve(solver, rows, moments, pattern)
    return waits


@pytest.mark.parametrize("pattern", [prune.PerRow(0.5), prune.NByM(2, 4)], ids=str)
@pytest.mark.parametrize("name", SOLVERS)
def test_many_chunks_take_the_waits_of_one(name: str, pattern: prune.Pattern) -> None:
    waits_of(SOLVERS[name], pattern, 5, 4096)  # what is learnt once
    one, many = waits_of(SOLVERS[name], pattern, 5, 4096), waits_of(SOLVERS[name], pattern, 5, 2 * NUM_IN)
    assert many.num_fetches == one.num_fetches == 1
    for waits in (one, many):  # of what the host has, and sends: which columns a row has
        del waits.calls["numpy"], waits.calls["from_numpy"]
    assert many.calls == one.calls


@pytest.mark.parametrize("name", SOLVERS)
def test_weights_that_are_not_finite_are_named(name: str) -> None:
    rows, moments = made(2)
    rows["l1"].weight[3, 3] = torch.inf
    with as_on_a_device(), pytest.raises(ValueError, match=r"NaN.*'block.l1'|'block.l1' are NaN"):
        solve(SOLVERS[name], rows, moments, prune.PerRow(0.5))
