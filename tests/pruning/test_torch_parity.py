"""On plain modules every name of ``torch.nn.utils.prune`` is here and does, to the bit, what it does there."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import distprune
from tests.sampling import in_turn, pairs_first

theirs: Any = torch.nn.utils.prune
ours: Any = distprune

PUBLIC = sorted(
    name
    for name, value in vars(theirs).items()
    if not name.startswith("_") and getattr(value, "__module__", "") == theirs.__name__
)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(7, 6),
    "conv": lambda: nn.Conv2d(5, 6, (2, 3)),
    "embedding": lambda: nn.Embedding(9, 6),
}
Act = Callable[[Any, Any], object]


def distinct(shape: torch.Size | tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return normal values of different magnitudes, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    num = math.prod(shape)
    drawn: Any = torch.randn(40 * num, generator=generator).to(dtype).abs()
    magnitudes = drawn.unique()
    chosen = magnitudes[torch.randperm(len(magnitudes), generator=generator)[:num]]
    signs = torch.randint(2, (num,), generator=generator) * 2 - 1
    values: torch.Tensor = (chosen * signs).view(shape)
    return values


def made(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    module = MODULES[kind]().to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(distinct(parameter.shape, dtype, seed))
    return module


def inputs(module: nn.Module) -> torch.Tensor:
    if isinstance(module, nn.Embedding):
        return torch.arange(9)
    shape = (3, 7) if isinstance(module, nn.Linear) else (2, 5, 4, 4)
    return distinct(shape, next(module.parameters()).dtype, seed=99)


def assert_bits(mine: torch.Tensor, expected: torch.Tensor) -> None:
    assert (mine.dtype, mine.shape) == (expected.dtype, expected.shape)
    as_bits = BITS[mine.element_size()]
    bits, wanted = (t.detach().contiguous().reshape(-1).view(as_bits) for t in (mine, expected))
    differ = (bits != wanted).nonzero().flatten().tolist()
    assert not differ, f"elements {differ}: {mine.reshape(-1)[differ]} instead of {expected.reshape(-1)[differ]}"


def assert_all_bits(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(mine) == list(expected)
    for name, tensor in mine.items():
        assert_bits(tensor, expected[name])


def assert_same(mine: Any, expected: Any) -> None:
    """Compare all of two pruned modules: state and its order, product, output and gradients."""
    assert_all_bits(mine.state_dict(), expected.state_dict())
    assert_all_bits(dict(mine.named_parameters()), dict(expected.named_parameters()))
    assert_all_bits(dict(mine.named_buffers()), dict(expected.named_buffers()))
    for name in ("weight", "bias"):
        if getattr(expected, name, None) is not None:
            assert_bits(getattr(mine, name), getattr(expected, name))
    outputs = [module(inputs(module)) for module in (mine, expected)]
    assert_bits(*outputs)
    for module, output in zip((mine, expected), outputs, strict=True):
        module.zero_grad()
        output.backward(distinct(output.shape, output.dtype, seed=5))
    grads = [{name: p.grad for name, p in module.named_parameters()} for module in (mine, expected)]
    assert_all_bits(*grads)


def check(module: nn.Module, *acts: Any) -> Any:
    """Do the same to two copies of ``module``, compare after every act, and return ours."""
    mine, expected = copy.deepcopy(module), copy.deepcopy(module)
    for act in acts:
        act(ours, mine)
        act(theirs, expected)
        assert_same(mine, expected)
    return mine


def params(function: Callable[..., object]) -> list[tuple[str, object, object]]:
    of_both = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in of_both if p.name not in ("group", "seed")]


def extras(function: Callable[..., object]) -> set[object]:
    return {p.kind for p in inspect.signature(function).parameters.values() if p.name in ("group", "seed")}


def test_there_are_public_names_to_compare() -> None:
    assert {"BasePruningMethod", "PruningContainer", "L1Unstructured", "global_unstructured", "remove"} <= {*PUBLIC}
    assert len(PUBLIC) == 17


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_the_same_signature(name: str) -> None:
    mine, expected = getattr(ours, name), getattr(theirs, name)
    assert name in ours.__all__
    pairs = {"": (mine, expected)}
    if inspect.isclass(expected):
        methods = [key for key, value in inspect.getmembers(expected) if inspect.isroutine(value)]
        own = [key for key in methods if any(key in vars(base) for base in expected.__mro__ if base is not object)]
        assert {"apply", "compute_mask", "prune", "remove", "apply_mask"} <= {*own}
        pairs = {key: (getattr(mine, key), getattr(expected, key)) for key in [*own, "__init__"]}
        assert getattr(mine, "PRUNING_TYPE", None) == getattr(expected, "PRUNING_TYPE", None)
        assert issubclass(mine, theirs.BasePruningMethod)
        assert inspect.isabstract(mine) == inspect.isabstract(expected)
    for key, (here, there) in pairs.items():
        if there is object.__init__:
            assert here is object.__init__
            continue
        assert params(here) == params(there), key
        assert extras(here) <= {inspect.Parameter.KEYWORD_ONLY}, key


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.sampled(6)
def test_unstructured(kind: str, dtype: torch.dtype) -> None:
    module = made(kind, dtype)
    names = [name for name, _ in module.named_parameters()]
    for amount in (0, 5, 0.0, 0.37, 1.0):
        for name in names:
            check(module, lambda p, m, name=name, amount=amount: p.l1_unstructured(m, name, amount))
    scores = distinct(module.weight.shape, dtype, seed=3)
    check(module, lambda p, m: p.l1_unstructured(m, "weight", 0.4, importance_scores=scores))
    for name in names:
        check(module, lambda p, m, name=name: p.identity(m, name))
        mask = torch.arange(getattr(module, name).numel()).view_as(getattr(module, name)) % 3
        for given in (mask == 1, (mask == 1).to(dtype), mask.double() / 2 - 0.25, mask == 2):
            check(module, lambda p, m, name=name, given=given: p.custom_from_mask(m, name, given))
    check(module, *[lambda p, m, name=name: p.l1_unstructured(m, name, 3) for name in names])


def channels_differ(t: torch.Tensor, n: Any, dim: int) -> bool:
    if t.dim() > 3 and n == "fro":  # PyTorch's does not take that
        n = 2
    norms = theirs._compute_norm(t, n, dim)
    return bool(norms.isfinite().all()) and len(norms.unique()) == len(norms)


@pytest.mark.parametrize(
    ("kind", "n", "dtype"), pairs_first(list(MODULES), [1, 2, "fro", math.inf, -math.inf, 3, 0.5, -1], FLOATS), ids=str
)
@pytest.mark.sampled(8)
def test_structured(kind: str, n: Any, dtype: torch.dtype) -> None:
    for dim in (0, 1, -1):
        # PyTorch rounds norms to the dtype: take values at which they still differ.
        seed = next(s for s in range(500) if channels_differ(made(kind, dtype, s).weight, n, dim))
        module = made(kind, dtype, seed)

        def act(prune: Any, m: Any, amount: float, dim: int = dim, scores: torch.Tensor | None = None) -> None:
            # On Conv2d PyTorch's "fro" raises; it is the 2-norm.
            fits = 2 if prune is theirs and m.weight.dim() > 3 and n == "fro" else n
            prune.ln_structured(m, "weight", amount, fits, dim, scores)

        for amount in (0, 1, 2, 0.5, 1.0):
            check(module, functools.partial(act, amount=amount))
        check(module, functools.partial(act, amount=1, scores=module.weight.detach().flip(0).clone()))
        if not isinstance(n, str):  # numpy's numbers
            check(module, lambda p, m, dim=dim: p.ln_structured(m, "weight", np.int64(1), np.float64(n), np.int64(dim)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.sampled(4)
def test_global(dtype: torch.dtype, with_scores: bool) -> None:
    values = distinct((300,), dtype)
    amounts: tuple[int | float, ...] = (0, 17, 0.5)

    def build() -> tuple[nn.ModuleList, list[tuple[nn.Module, str]]]:
        modules = nn.ModuleList(made(kind, dtype) for kind in MODULES)
        torch.nn.utils.vector_to_parameters(
            values[: sum(p.numel() for p in modules.parameters())], modules.parameters()
        )
        return modules, [(modules[0], "weight"), (modules[0], "bias"), (modules[1], "weight"), (modules[2], "weight")]

    assert sum(p.numel() for p in build()[0].parameters()) <= 300
    for amount in amounts:
        (mine, my_pairs), (expected, pairs) = build(), build()
        for _ in range(3):
            for prune, of in ((ours, my_pairs), (theirs, pairs)):
                scores = {(m, name): distinct(getattr(m, name).shape, dtype, i) for i, (m, name) in enumerate(of)}
                scores.pop(of[1])  # some have scores, the others their values
                given = scores if with_scores else None
                prune.global_unstructured(of, prune.L1Unstructured, importance_scores=given, amount=amount)
            for here, there in zip(mine, expected, strict=True):
                assert_same(here, there)


def test_global_over_several_dtypes() -> None:
    for prune, modules in (built := [(p, [made("linear"), made("conv", torch.float64)]) for p in (ours, theirs)]):
        prune.global_unstructured([(m, "weight") for m in modules], prune.L1Unstructured, amount=0.5)
    for here, there in zip(built[0][1], built[1][1], strict=True):
        assert_same(here, there)


STEPS: dict[str, Act] = {
    "l1": lambda p, m: p.l1_unstructured(m, "weight", 0.3),
    "l1 int": lambda p, m: p.l1_unstructured(m, "weight", 4),
    "rows": lambda p, m: p.ln_structured(m, "weight", 1, 2, 0),
    "columns": lambda p, m: p.ln_structured(m, "weight", 0.3, 1, 1),
    "l1 by scores": lambda p, m: p.l1_unstructured(m, "weight", 0.2, distinct(m.weight.shape, m.weight.dtype, 8)),
    "rows by scores": lambda p, m: p.ln_structured(m, "weight", 0.2, 2, 0, distinct(m.weight.shape, m.weight.dtype, 9)),
    "identity": lambda p, m: p.identity(m, "weight"),
    "mask": lambda p, m: p.custom_from_mask(m, "weight", torch.arange(m.weight.numel()).view_as(m.weight) % 7 > 0),
    "global": lambda p, m: p.global_unstructured([(m, "weight"), (m, "bias")], p.L1Unstructured, amount=0.1),
}


@pytest.mark.parametrize(
    ("both", "thirds"),
    in_turn(
        list(itertools.product(STEPS, STEPS)),
        [(kind, third) for third in ("l1", "rows", "columns") for kind in ("linear", "conv")],
        num=2,
    ),
)
@pytest.mark.sampled(16)
def test_three_calls_of_any_methods(both: tuple[str, str], thirds: list[tuple[str, str]]) -> None:
    first, second = both
    for kind, third in thirds:
        mine = check(made(kind, seed=2), STEPS[first], STEPS[second], STEPS[third])
        (hook,) = [hook for hook in mine._forward_pre_hooks.values() if hook._tensor_name == "weight"]
        assert len(hook) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_three_calls_in_other_dtypes(dtype: torch.dtype) -> None:
    for names in (("l1", "l1 by scores", "mask"), ("global", "l1 int", "global"), ("mask", "identity", "l1")):
        check(made("linear", dtype), *[STEPS[name] for name in names])
    check(made("linear", torch.float64), STEPS["rows"], STEPS["l1"], STEPS["columns"])


@pytest.mark.parametrize("then", ["l1", "l1 by scores", "identity", "mask", "rows", "columns", "rows by scores"])
def test_pruning_goes_on_from_a_mask_that_is_not_binary(then: str) -> None:
    module = made("linear")
    mixed = torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0]).repeat(9)[:42].view(6, 7)
    for mask in (mixed, torch.full((6, 7), 0.5)):
        check(module, lambda p, m, mask=mask: p.custom_from_mask(m, "weight", mask), STEPS[then])


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("again", [False, True])
def test_scores_of_another_dtype(dtype: torch.dtype, again: bool) -> None:
    """PyTorch's mask then may take the scores' dtype. Ours is always of the parameter's."""
    scores = torch.arange(42).flip(0).view(6, 7).to(dtype)
    acts: list[Act] = [lambda p, m: p.l1_unstructured(m, "weight", 7, scores)]
    if dtype.is_floating_point:
        acts.append(lambda p, m: p.ln_structured(m, "weight", 2, 1, 0, scores))
    for act in acts:
        mine, expected = made("linear"), made("linear")
        for prune, module in ((ours, mine), (theirs, expected)):
            if again:
                STEPS["l1"](prune, module)
            act(prune, module)
        assert_bits(mine.weight_mask, expected.weight_mask.float())
        assert_bits(mine.weight, expected.weight)


RANDOM: dict[str, tuple[int, Act]] = {
    "elements": (42, lambda p, m: p.random_unstructured(m, "weight", 5)),
    "fraction": (42, lambda p, m: p.random_unstructured(m, "weight", 0.3)),
    "rows": (6, lambda p, m: p.random_structured(m, "weight", 1, 0)),
    "columns": (7, lambda p, m: p.random_structured(m, "weight", 0.3, -1)),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_pruning_takes_as_many_as_pytorch(kind: str) -> None:
    mine, expected = made("linear"), made("linear")
    for _ in range(4):
        RANDOM[kind][1](ours, mine)
        RANDOM[kind][1](theirs, expected)
        assert mine.weight_mask.dtype == expected.weight_mask.dtype
        assert int(mine.weight_mask.sum()) == int(expected.weight_mask.sum())
        assert list(mine.state_dict()) == list(expected.state_dict())


def test_random_masks_follow_the_seed() -> None:
    def mask(act: Act) -> torch.Tensor:
        module = nn.Linear(70, 60)
        act(ours, module)
        return module.get_buffer("weight_mask")

    pairs: list[tuple[Act, Act]] = [
        (
            lambda p, m: p.random_unstructured(m, "weight", 0.3, seed=1),
            lambda p, m: p.random_unstructured(m, "weight", 0.3, seed=2),
        ),
        (
            lambda p, m: p.random_structured(m, "weight", 0.3, 0, seed=1),
            lambda p, m: p.random_structured(m, "weight", 0.3, 0, seed=2),
        ),
        (
            lambda p, m: p.global_unstructured([(m, "weight")], p.RandomUnstructured, seed=1, amount=0.3),
            lambda p, m: p.global_unstructured([(m, "weight")], p.RandomUnstructured, seed=2, amount=0.3),
        ),
    ]
    for one, two in pairs:
        assert torch.equal(mask(one), mask(one))
        assert not torch.equal(mask(one), mask(two))
    for kind in ("fraction", "columns"):
        drawn = []
        for seed in (3, 3, 4):
            module = nn.Linear(70, 60)
            torch.manual_seed(seed)
            RANDOM[kind][1](ours, module)
            drawn.append(module.get_buffer("weight_mask"))
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])
