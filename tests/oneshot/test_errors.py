"""What one rank raises between two collectives, all ranks raise: nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from typing_extensions import override

from distprune import Block, NByM, Unstructured
from distprune.calibration.moments import Moments
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.recipe import OneShotMethod
from distprune.oneshot.report import BlockReport
from distprune.oneshot.rows import Rows
from distprune.oneshot.solver import Choose, Solved
from distprune.oneshot.sparsegpt import SparseGPT
from distprune.patterns.base import Pattern
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import sharded
from tests.worlds import run_threads

TOKENS = samples(4)
HALF = Unstructured(0.5)


class Boom(OSError):
    pass


def check_all_raise(num_ranks: int, fn: Callable[..., Any], *args: Any, match: str = "boom") -> None:
    """The rank that failed raises its own error, the others one that names it."""
    errors = run_threads(num_ranks, fn, *args, catch=True)
    for rank, error in enumerate(errors):
        assert isinstance(error, Exception), f"rank {rank} ended with {error!r}"
        assert match in str(error)
    assert sum(not str(error).startswith("rank ") for error in errors) == 1


def boom_at(num_calls: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` that raises when it is called for the ``num_calls``-th time."""
    counter = iter(range(num_calls))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(counter, None) is None:
            raise Boom("boom")
        return fn(*args, **kwargs)

    return wrapped


@dataclass(frozen=True)
class Failing(SparseGPT):
    """Fails on one rank: preparing its first input, before it solves one, at some choice, or when it has."""

    rank: int
    where: str

    @override
    def prepare(self, moments: Moments) -> dict[str, torch.Tensor]:
        if self.where == "prepare" and self.rank == 1:
            raise Boom("boom")
        return super().prepare(moments)

    @override
    def solve(self, rows: Mapping[str, Rows], moments: Moments, pattern: Pattern, choose: Choose) -> dict[str, Solved]:
        name, _, num = self.where.partition(" ")
        fails = self.rank == 1 and name == "choose"
        solved = super().solve(rows, moments, pattern, boom_at(int(num), choose) if fails else choose)
        if self.rank == 1 and name == "solve":
            raise Boom("boom")
        return solved


def sweep_fails(rank: int, where: str, pattern: Pattern) -> None:
    prune_blocks(sharded(tiny_model("llama")), TOKENS, method=Failing(rank, where), pattern=pattern)


@pytest.mark.parametrize("where", ["prepare", "solve", "choose 0", "choose 1", "choose 3"])
@pytest.mark.parametrize("pattern", [HALF, Block(4, 0.5), NByM(2, 4)], ids=str)
@pytest.mark.sampled(4)
def test_a_solver_fails_on_one_rank(monkeypatch: pytest.MonkeyPatch, where: str, pattern: Pattern) -> None:
    monkeypatch.setattr("distprune.oneshot.sparsegpt.COLUMNS", 8)
    if where.startswith("choose") and pattern.is_by_row:
        pytest.skip("each row is decided by itself")
    check_all_raise(2, sweep_fails, where, pattern)


def calls_back(rank: int, on: Sequence[int], fails: bool) -> tuple[int, int]:
    seen: list[int] = []

    def on_block(index: int, _: BlockReport) -> None:
        seen.append(index)
        if fails and rank == 1:
            raise Boom("boom")

    how: dict[str, Any] = {"method": "wanda", "on_block": on_block if rank in on else None}
    return prune_blocks(tiny_model("llama"), TOKENS, 0.5, **how).num_rounds, len(seen)


@pytest.mark.parametrize("on", [[0, 1], [1]], ids=str)
def test_a_callback_fails(on: list[int]) -> None:
    check_all_raise(2, calls_back, on, True)


def test_a_callback_on_one_rank_alone() -> None:
    (num_rounds, first), (same, other) = run_threads(2, calls_back, [0], False)
    assert (first, other) == (3, 0)
    assert num_rounds == same


def finished_differs(rank: int, first: int, method: OneShotMethod) -> None:
    prune_blocks(tiny_model("llama"), TOKENS, 0.5, method=method, finished=lambda index: index < first + rank)


@pytest.mark.parametrize("method", ["wanda", "admm"])
@pytest.mark.parametrize("first", [0, 1])
def test_ranks_that_have_finished_different_blocks(first: int, method: OneShotMethod) -> None:
    for error in run_threads(2, finished_differs, first, method, catch=True):
        assert type(error) is ValueError
        assert f"finished({first}): false on rank 0; true on rank 1" in str(error)


def forward_fails(rank: int, layer: str, num_calls: int, shard: bool) -> None:
    model: Any = tiny_model("llama")
    module = model.get_submodule(layer)
    if rank == 1:
        module.forward = boom_at(num_calls, module.forward)
    prune_blocks(sharded(model) if shard else model, TOKENS, 0.5, method="wanda", batch_tokens=1)


# Of two samples a rank: two runs of block 1 show what its layers are given, two what it then puts out.
@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("num_calls", [0, 1, 2, 3])
@pytest.mark.sampled(3)
def test_a_forward_fails(num_calls: int, shard: bool) -> None:
    check_all_raise(2, forward_fails, "model.layers.1.mlp.down_proj", num_calls, shard)


def infinite_weights(_: int) -> None:
    """Inf * 0: scores that are NaN, of the rows that the last rank holds."""
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = 0  # an input of down_proj that is always 0
        model.model.layers[0].mlp.down_proj.weight[-1, 3] = torch.inf
    prune_blocks(sharded(model), TOKENS, 0.5, method="wanda")


def test_scores_that_are_nan() -> None:
    for error in run_threads(2, infinite_weights, catch=True):
        assert isinstance(error, ValueError)
        assert "NaN" in str(error)


def wrong_samples_on_one(rank: int) -> None:
    prune_blocks(sharded(tiny_model("llama")), TOKENS - 100 * rank, 0.5, method="magnitude")


def test_wrong_samples_on_one_rank() -> None:
    check_all_raise(2, wrong_samples_on_one, match="outside the model's vocabulary")
