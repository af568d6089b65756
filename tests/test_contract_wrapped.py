"""The same promise as torch wraps a model: every method in every layout of the table gives one process's masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import nn
from torch.distributed.fsdp import FSDPModule

import distprune as prune
from distprune.patterns.as_pattern import as_pattern
from distprune.shards.layouts import find_flat_parts
from tests.contract import COLUMNS, ROWS, SEED, Below, OwnScore
from tests.sampling import only_whole
from tests.worlds import ProcessPool
from tests.wrapped import WRAPPERS, Wrapped, batches, pairs_of, transformer, whole, wrap

Pairs = list[tuple[nn.Module, str]]


def _mask(parameter: torch.Tensor) -> torch.Tensor:
    return torch.arange(parameter.numel()).view(parameter.shape) % 5 != 2


def _custom(pairs: Pairs) -> None:
    for module, name in pairs:
        shape = module.get_parameter(name if name in module._parameters else f"{name}_orig").shape
        prune.custom_from_mask(module, name, _mask(torch.empty(shape)))


def _remove(pairs: Pairs) -> None:
    prune.prune_each(pairs, prune.L1Unstructured, amount=0.4)
    for module, name in pairs:
        prune.remove(module, name)


def _each(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[Pairs], None]:
    def run(pairs: Pairs) -> None:
        for module, name in pairs:
            call(module, name, *args, **kwargs)

    return run


# By row of the table: the call on (module, name) pairs.
CALLS: dict[str, Callable[[Pairs], None]] = {
    "`identity`": _each(prune.identity),
    "`l1_unstructured`": _each(prune.l1_unstructured, 0.5),
    "`random_unstructured`": _each(prune.random_unstructured, 0.3, seed=SEED),
    "`ln_structured`": _each(prune.ln_structured, 3, 1, 0),
    "`random_structured`": _each(prune.random_structured, 0.3, dim=1, seed=SEED),
    "`custom_from_mask`": _custom,
    "`global_unstructured`": lambda pairs: prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.6),
    "`l1_pattern`": _each(prune.l1_pattern, prune.NByM(2, 6)),
    "`random_pattern`": _each(prune.random_pattern, prune.Block(3, 0.5), seed=SEED),
    "`remove`": _remove,
}
IN_PLACE: dict[str, dict[str, Any]] = {
    "`prune_model`, magnitude": {"sparsity": 0.5},
    "`prune_model`, random": {"score": "random", "sparsity": 0.3, "seed": SEED},
    "`prune_model`, N:M": {"pattern": "2:6"},
    "`prune_model`, per row": {"score": "random", "pattern": "row", "sparsity": 0.4, "seed": SEED},
    "`prune_model`, channels": {"pattern": "channels:0", "sparsity": 0.3},
    "`prune_model`, a score of your own": {"score": OwnScore(), "sparsity": 0.4},
    "`prune_model`, a pattern of your own": {"pattern": Below(0.02)},
    "`prune_model`, blocks": {"pattern": "block:3", "sparsity": 0.4},
}
Parameters = dict[str, torch.Tensor]


def reparametrized(model: nn.Module, row: str) -> Parameters:
    """Return the whole weights after two calls, the second on top of the first. Each layer has two of the pairs."""
    pairs = [pair for i, pair in enumerate(pairs_of(model)) if i in (0, 2, 5, 7)]
    if row != "`remove`":
        prune.prune_each(pairs, prune.L1Unstructured, amount=0.5)
    CALLS[row](pairs)
    found = {f"{i}": whole(getattr(module, name)) for i, (module, name) in enumerate(pairs)}
    if row != "`remove`":
        for module, name in pairs:
            prune.remove(module, name)
    return found


class Used:
    """A wrapped model, which takes long to make: ``model`` has its first weights each time it is asked for.

    A forward has left some of its parameters unsharded.
    """

    def __init__(self, layout: str) -> None:
        self._layout = layout
        self._make()

    def _make(self) -> None:
        self._wrapped: Wrapped = wrap(self._layout, transformer())
        self._first = {name: values.detach().clone() for name, values in self._wrapped.model.named_parameters()}
        self._is_new = True

    @property
    def model(self) -> nn.Module:
        if not self._is_new and self._layout == "fsdp1":  # its parameters are views of what comes and goes
            self._make()
        model = self._wrapped.model
        if not self._is_new:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            with torch.no_grad():
                for name, values in model.named_parameters():
                    values.copy_(self._first[name])
        self._is_new = False
        model(batches(1)[0])
        return model


def reparametrized_on_rank(_: int, layout: str, rows: list[str]) -> list[Parameters]:
    used = Used(layout)
    return [reparametrized(used.model, row) for row in rows]


def in_place(model: nn.Module, scope: str, options: dict[str, Any]) -> prune.PruneReport:
    prune.prune_model(model, pattern=prune.Unstructured(7), score="random", seed=3, include="layers.*")
    pattern = options.get("pattern")
    chosen: dict[str, Any] = {} if pattern is not None else {"include": "layers.*"}  # patterns are for matrices
    if pattern is None or as_pattern(pattern, options.get("sparsity")).has_scope:
        chosen["scope"] = scope
    return prune.prune_model(model, **chosen, **options)


def in_place_on_rank(_: int, layout: str, calls: list[tuple[str, str]]) -> list[tuple[Any, Parameters]]:
    used = Used(layout)
    return [_in_place_on_rank(layout, used.model, scope, IN_PLACE[row]) for row, scope in calls]


def _in_place_on_rank(layout: str, model: nn.Module, scope: str, options: dict[str, Any]) -> tuple[Any, Parameters]:
    report = in_place(model, scope, options)
    if layout == "fsdp1":
        return report.parameters, _flat_values(model)
    bare = getattr(model, "module", model)
    return report.parameters, {name: whole(parameter) for name, parameter in bare.named_parameters()}


def _flat_values(model: nn.Module) -> Parameters:
    """Return by name the flat indices and values this rank holds, as two rows."""
    names = {id(module): name.replace("_fsdp_wrapped_module", "").strip(".") for name, module in model.named_modules()}
    return {
        f"{names[key]}.{name}".strip("."): torch.stack(
            [part.geometry.flat_indices(0, part.local.numel()).double(), part.local.double()]
        )
        for key, of_module in find_flat_parts(model).items()
        for name, part in of_module.items()
    }


# What runs in the other ways of wrapping with FSDP2, but for --whole: they add how weights lie.
SAMPLED = ("`l1_unstructured`", "`l1_pattern`", "`prune_model`, magnitude", "`prune_model`, blocks")


def cases(of: Collection[str], scopes: Sequence[str]) -> list[ParameterSet]:
    """Return (layout, the most ranks it is wrapped on, rows with their scope).

    By default each of those rows ``of`` the table that the layout has a tick in, with scopes in turn; what FSDP2 makes
    with something else takes every second.
    """
    found = []
    for number, (column, wrappers) in enumerate(WRAPPERS.items()):
        rows = [row for row, columns in ROWS.items() if row in of and column in columns]
        for i, (name, (_, sizes)) in enumerate(wrappers.items() if rows else ()):
            some = [row for row in rows if name == column.lower() or column != "FSDP2" or row in SAMPLED]
            if i > 0 or column in ("HSDP", "FSDP x TP"):
                some = some[(number + i) % 2 :: 2]
            in_turn = [(row, scopes[(number + k) % len(scopes)]) for k, row in enumerate(some)]
            found.append(pytest.param(name, sizes[-1], in_turn, id=name))
            rest = [each for each in itertools.product(rows, scopes) if each not in in_turn]
            if rest:
                found.append(only_whole(name, sizes[-1], rest, id=f"{name}-whole"))
    return found


@pytest.mark.parametrize(("layout", "world_size", "calls"), cases(CALLS, ("",)))
def test_reparametrized(pool: ProcessPool, layout: str, world_size: int, calls: list[tuple[str, str]]) -> None:
    rows = [row for row, _ in calls]
    expected = {row: reparametrized(transformer(), row) for row in rows}
    for of_rank in pool.run(world_size, reparametrized_on_rank, layout, rows):
        for row, weights in zip(rows, of_rank, strict=True):
            assert all(torch.equal(weights[name], values) for name, values in expected[row].items()), row


@pytest.mark.parametrize(("layout", "world_size", "calls"), cases(IN_PLACE, ("global", "tensor")))
def test_in_place(pool: ProcessPool, layout: str, world_size: int, calls: list[tuple[str, str]]) -> None:
    of_ranks = pool.run(world_size, in_place_on_rank, layout, calls)
    for (row, scope), *of_call in zip(calls, *of_ranks, strict=True):
        model = transformer()
        report = in_place(model, scope, IN_PLACE[row])
        for parameters, weights in of_call:
            assert [(p.name, p.num_zeros) for p in parameters] == [(p.name, p.num_zeros) for p in report.parameters]
            for name, values in model.named_parameters():
                if layout == "fsdp1":
                    flat, local = weights[name]
                    assert torch.equal(values.detach().flatten()[flat.long()].double(), local), (row, scope, name)
                else:
                    assert torch.equal(weights[name], values), (row, scope, name)


def test_every_row_is_run() -> None:
    assert set(CALLS) | set(IN_PLACE) == set(ROWS)
    assert set(WRAPPERS) == set(COLUMNS) - {"stages", "MPI"}  # those have tests of their own
