"""What one rank raises between two collectives, all ranks raise: nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distprune import Unstructured
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.oneshot.recipe import OneShotMethod
from tests.architectures import samples, tiny_model
from tests.oneshot.alike import sharded
from tests.worlds import all_raise, run_threads

TOKENS = samples(4)
HALF = Unstructured(0.5)


class Boom(OSError):
    pass


def check_all_raise(num_ranks: int, fn: Callable[..., Any], *args: Any, match: str = "boom") -> None:
    """The rank that failed raises its own error, the others one that names it."""
    errors = all_raise(num_ranks, fn, *args, match=match)
    assert sum(not str(error).startswith("rank ") for error in errors) == 1


def boom_at(num_calls: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` that raises when it is called for the ``num_calls``-th time."""
    counter = iter(range(num_calls))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(counter, None) is None:
            raise Boom("boom")
        return fn(*args, **kwargs)

    return wrapped


def calls_back(rank: int) -> tuple[int, list[int]]:
    seen: list[int] = []
    on_block = None if rank else lambda index, _: seen.append(index)
    return prune_blocks(tiny_model("llama"), TOKENS, 0.5, method="wanda", on_block=on_block).num_rounds, seen


def test_a_callback_on_one_rank_alone() -> None:
    (num_rounds, first), (same, other) = run_threads(2, calls_back)
    assert (first, other) == ([0, 1, 2], [])
    assert num_rounds == same


def finished_differs(rank: int, first: int, method: OneShotMethod) -> None:
    prune_blocks(tiny_model("llama"), TOKENS, 0.5, method=method, finished=lambda index: index < first + rank)


@pytest.mark.parametrize(("first", "method"), [(0, "wanda"), (1, "admm")])
def test_ranks_that_have_finished_different_blocks(first: int, method: OneShotMethod) -> None:
    match = rf"finished\({first}\): false on rank 0; true on rank 1"
    all_raise(2, finished_differs, first, method, kind=ValueError, match=match)


def forward_fails(rank: int, layer: str, num_calls: int) -> None:
    model: Any = tiny_model("llama")
    module = model.get_submodule(layer)
    if rank == 1:
        module.forward = boom_at(num_calls, module.forward)
    prune_blocks(sharded(model), TOKENS, 0.5, method="wanda", batch_tokens=1)


# Of two samples a rank: two runs of block 1 show what its layers are given, two what it then puts out.
@pytest.mark.parametrize("num_calls", [0, 1, 2, 3])
@pytest.mark.sampled(2)
def test_a_forward_fails(num_calls: int) -> None:
    check_all_raise(2, forward_fails, "model.layers.1.mlp.down_proj", num_calls)


def infinite_weights(_: int) -> None:
    """Inf * 0: scores that are NaN, of the rows that the last rank holds."""
    model: Any = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = 0  # an input of down_proj that is always 0
        model.model.layers[0].mlp.down_proj.weight[-1, 3] = torch.inf
    prune_blocks(sharded(model), TOKENS, 0.5, method="wanda")


def test_scores_that_are_nan() -> None:
    all_raise(2, infinite_weights, kind=ValueError, match="NaN")
