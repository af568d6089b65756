"""User-written methods, containers and roll-back, beside ``torch.nn.utils.prune`` on plain modules."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from typing_extensions import override

from tests.pruning.test_torch_parity import STEPS, assert_bits, assert_same, check, distinct, made, ours, theirs
from tests.pruning.test_torch_state import BOTH, X, lstm, nested, train


def smallest_half(_: Any, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
    mask = default_mask.clone()
    mask.view(-1)[t.reshape(-1).argsort()[: t.numel() // 2]] = 0
    return mask


def lowest_row(_: Any, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
    mask = default_mask.clone()
    mask[t.flatten(1).sum(1).argmin()] = 0
    return mask


def every_third(_: Any, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
    return default_mask * (torch.arange(t.numel()).view(t.shape) % 3 > 0)


COMPUTE: dict[str, Any] = {"unstructured": smallest_half, "structured": lowest_row, "global": every_third}


def user_method(base: Any, kind: str, compute: Any = None, **members: Any) -> Any:
    """Return a user's subclass of the ``BasePruningMethod`` of distprune or of PyTorch."""
    members = {"PRUNING_TYPE": kind, "dim": 0, "compute_mask": compute or COMPUTE[kind], **members}
    return type("Users", (base.BasePruningMethod,), members)


@pytest.mark.parametrize("base", BOTH, ids=["distprune", "torch"])
@pytest.mark.parametrize("before", [None, "l1", "rows", "mask"])
@pytest.mark.parametrize("kind", COMPUTE)
@pytest.mark.sampled(8)
def test_users_methods_equal_pytorch(kind: str, before: str | None, base: Any) -> None:
    def prune(p: Any, module: Any, scores: torch.Tensor | None) -> None:
        if p is theirs:
            user_method(theirs, kind).apply(module, "weight", importance_scores=scores)
        elif base is ours:
            user_method(ours, kind).apply(module, "weight", importance_scores=scores)
        else:  # its own apply is PyTorch's
            by_pair = None if scores is None else {(module, "weight"): scores}
            p.prune_each([(module, "weight")], user_method(theirs, kind), by_pair)

    for scores in (None, distinct((6, 7), seed=4)):
        act = functools.partial(prune, scores=scores)
        for after in ("l1", "rows", "mask", "global"):
            check(made("linear"), *([STEPS[before]] if before else []), act, STEPS[after], act)


@pytest.mark.parametrize("base", BOTH, ids=["distprune", "torch"])
@pytest.mark.parametrize("before", [None, "l1", "mask", "global"])
def test_users_methods_over_all_parameters_equal_pytorch(before: str | None, base: Any) -> None:
    def prune(p: Any, module: Any) -> None:
        method = user_method(base if p is ours else theirs, "unstructured")
        names = ("weight",) if before == "l1" else ("weight", "bias")
        p.global_unstructured([(module, name) for name in names], method)
        with pytest.raises(TypeError, match="unstructured"):
            p.global_unstructured([(module, "weight")], user_method(base if p is ours else theirs, "global"))

    check(made("linear"), *([STEPS[before]] if before else []), prune, prune)


def test_a_users_method_with_a_product_of_its_own() -> None:
    def doubled(self: Any, module: Any) -> torch.Tensor:
        product: torch.Tensor = module.weight_mask * getattr(module, self._tensor_name + "_orig")
        return 2 * product

    def prune(p: Any, module: Any) -> None:
        user_method(p, "unstructured", apply_mask=doubled).apply(module, "weight")

    check(made("linear"), prune, lambda p, module: p.remove(module, "weight"))


@pytest.mark.parametrize("steps", [("l1",), ("rows", "l1"), ("global", "columns")], ids="-".join)
def test_either_library_goes_on_with_what_the_other_pruned(steps: tuple[str, ...]) -> None:
    ours_then, mixed, theirs_then, expected, removed = (made("linear") for _ in range(5))
    for step in steps:
        STEPS[step](ours, ours_then)
        STEPS[step](ours, mixed)
        for module in (theirs_then, expected, removed):
            STEPS[step](theirs, module)
    for hook in ours_then._forward_pre_hooks.values():
        assert isinstance(hook, theirs.BasePruningMethod)
    assert theirs.is_pruned(ours_then)
    assert ours.is_pruned(theirs_then)
    assert_same(ours_then, expected)
    weight = removed.weight_orig
    ours.remove(removed, "weight")
    assert removed.weight is weight
    assert ("weight_orig" in removed.state_dict(), type(removed)) == (False, nn.Linear)
    STEPS["l1"](theirs, expected)
    STEPS["l1"](ours, theirs_then)
    STEPS["l1"](theirs, mixed)
    STEPS["l1"](ours, ours_then)
    for module in (theirs_then, mixed):
        assert_same(module, expected)
    for module in (ours_then, theirs_then, mixed, expected):
        parameters = set(module.parameters())
        for hook in list(module._forward_pre_hooks.values()):
            theirs.remove(module, hook._tensor_name)
        assert set(module.parameters()) == parameters == {module.weight, module.bias}
        assert type(module) is nn.Linear
        assert not module._forward_hooks
        assert not {"weight", "bias"} & set(vars(module))
    for module in (ours_then, theirs_then, mixed):
        assert_same(module, expected)


def test_attention_whose_output_weight_is_read_from_outside() -> None:
    """The module that holds it never runs its own forward there, so PyTorch's product is the first one for good."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(4, 2)
    ours.l1_unstructured(module, "in_proj_weight", 0.5)
    ours.l1_unstructured(module.out_proj, "weight", 0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        before: Any = module.out_proj.weight.detach().clone()
        train(module, X, X, X, steps=1, optimizer=optimizer)
        assert not torch.equal(module.out_proj.weight, before)
    plain = nn.MultiheadAttention(4, 2)
    pruned = copy.deepcopy(module)
    ours.remove(pruned, "in_proj_weight")
    ours.remove(pruned.out_proj, "weight")
    plain.load_state_dict(pruned.state_dict())
    for each in (plain, pruned):
        assert_bits(each(X, X, X)[0], module(X, X, X)[0])
        assert_bits(each.eval()(X, X, X)[0], module(X, X, X)[0])


def test_containers_hold_methods_as_pytorch_does() -> None:
    for p in BOTH:
        module = made("linear")
        first = p.L1Unstructured.apply(module, "weight", 0.1)
        container = p.LnStructured.apply(module, "weight", 1, 2, 0)
        assert p.L1Unstructured.apply(module, "weight", 3) is container
        assert isinstance(container, p.PruningContainer)
        assert list(module._forward_pre_hooks.values()) == [container]
        assert (len(container), container[0], next(iter(container))) == (3, first, first)
        assert [type(m) for m in container[1:]] == [p.LnStructured, p.L1Unstructured]
        with pytest.raises(IndexError):
            container[3]
        with pytest.raises(TypeError, match="is not a BasePruningMethod subclass"):
            container.add_pruning_method("l1")
        other = p.L1Unstructured(0.1)
        other._tensor_name = "bias"
        with pytest.raises(ValueError, match="the parameter named 'weight'"):
            container.add_pruning_method(other)
        assert (len(p.PruningContainer(first)), p.PruningContainer(first)._tensor_name) == (1, "weight")
        assert len(p.PruningContainer()) == 0
        with pytest.raises(AttributeError):
            p.PruningContainer(1)
        added = user_method(theirs, "global")()
        added._tensor_name = "weight"
        container.add_pruning_method(added)
        assert container[3] is added
        with pytest.raises(ValueError, match="Unrecognized PRUNING_TYPE"):
            user_method(p, "odd", smallest_half).apply(module, "weight")


def test_methods_compute_masks_on_tensors_as_pytorch_does() -> None:
    t, scores, binary = distinct((6, 7)), distinct((6, 7), seed=3), (distinct((6, 7), seed=1) > -0.5).float()
    cases = (("Identity", ()), ("L1Unstructured", (0.3,)), ("LnStructured", (2, 1, 0)))
    for mask, (name, arguments) in itertools.product((binary, binary / 2, binary.cumsum(0) % 3), cases):
        mine, expected = getattr(ours, name)(*arguments), getattr(theirs, name)(*arguments)
        assert_bits(mine.compute_mask(t, mask), expected.compute_mask(t, mask))
        assert_bits(mine.prune(t), expected.prune(t))
        assert_bits(mine.prune(t, mask, scores), expected.prune(t, default_mask=mask, importance_scores=scores))
        for method in (mine, expected):
            method._tensor_name = "t"
        containers = [p.PruningContainer(method) for p, method in zip(BOTH, (mine, expected), strict=True)]
        assert_bits(*[container.compute_mask(t, mask) for container in containers])
        assert_bits(*[container.prune(t, mask) for container in containers])


def test_complex_tensors_rank_by_their_modulus() -> None:
    z = torch.tensor([1 + 10j, 5, 2 + 2j, 0.1 + 8j])
    for p in BOTH:
        assert p.L1Unstructured(2).prune(z).tolist() == [z[0], 0, 0, z[3]]
    layer: Any = nn.Linear(4, 1, bias=False)
    assert ours.l1_unstructured(layer, "weight", 2, importance_scores=z[None]).weight_mask.tolist() == [[1, 0, 0, 1]]


def test_a_method_without_a_type_until_there_are_two() -> None:
    for base in BOTH:
        module, method = made("linear"), user_method(base, "global", smallest_half)
        del method.PRUNING_TYPE
        ours.prune_each([(module, "weight")], method)
        assert (module.weight_mask == 0).sum() == module.weight_mask.numel() // 2
        with pytest.raises(ValueError, match="Unrecognized PRUNING_TYPE None"):
            ours.prune_each([(module, "weight")], method)


def test_a_mask_is_not_learned() -> None:
    with pytest.raises(NotImplementedError, match="a mask is not learned here"):
        ours.custom_from_mask(made("linear"), "weight", torch.ones(6, 7, requires_grad=True))


class Registered(nn.Linear):
    """A class that keeps a list of its subclasses, which have to say what they are."""

    kinds: ClassVar[dict[str, type]] = {}

    @override
    def __init_subclass__(cls, *, kind: str) -> None:
        cls.kinds[kind] = cls


class Linear(Registered, kind="linear"):
    pass


def test_a_pruned_module_is_no_other_kind_of_module() -> None:
    layer = ours.l1_unstructured(Linear(4, 4), "weight", 0.5)
    assert isinstance(layer, Linear)
    assert Registered.kinds == {"linear": Linear}
    assert (layer(torch.ones(1, 4)) == nn.functional.linear(torch.ones(1, 4), layer.weight, layer.bias)).all()


def everything(module: Any) -> list[object]:
    """Return all there is in a module and its hooks, by identity and by value."""
    hooks = [hook for key in ("_forward_pre_hooks", "_forward_hooks") for hook in getattr(module, key).values()]
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return [
        type(module),
        [(name, id(tensor), tensor.tolist()) for name, tensor in tensors],
        sorted(vars(module)),
        [(id(hook), {k: repr(v) for k, v in vars(hook).items()}) for hook in hooks],
        dict(module._forward_hooks_always_called),
        module._non_persistent_buffers_set,
        [id(weight) for weight in module._flat_weights if weight is not None and weight.is_leaf]
        if isinstance(module, nn.RNNBase)
        else [],
    ]


def raising(_: Any, _t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
    default_mask.zero_()
    raise ZeroDivisionError("the user's own")


def failures(module: Any, name: str) -> list[Callable[[], object]]:
    def wrong_shape(_: Any, _t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        return default_mask[..., :-1]

    calls: list[Callable[[], object]] = []
    for compute in (raising, wrong_shape):
        for base in BOTH:
            method = user_method(base, "global", compute)
            calls.append(functools.partial(ours.prune_each, [(module, name)], method))
        calls.append(functools.partial(user_method(ours, "structured", compute).apply, module, name))
        flat = user_method(theirs, "unstructured", compute)
        calls.append(functools.partial(ours.global_unstructured, [(module, name)], flat))
    calls.append(functools.partial(ours.l1_unstructured, module, name, 10**6))
    calls.append(functools.partial(ours.ln_structured, module, name, 10**6, 2, 0))
    calls.append(functools.partial(ours.prune_each, [(module, name), (module, "none")], ours.Identity))
    return calls


@pytest.mark.parametrize("before", ["nothing", "one", "container", "torch", "torch container"])
def test_a_call_that_fails_changes_nothing(before: str) -> None:
    for module, name in ((made("linear"), "weight"), (lstm(), "weight_ih_l0")):
        p = theirs if "torch" in before else ours
        if before != "nothing":
            p.l1_unstructured(module, name, 0.3)
        if "container" in before:
            p.ln_structured(module, name, 1, 2, 0)
        there = everything(module)
        for call in failures(module, name):
            with pytest.raises(Exception):  # noqa: B017, PT011
                call()
            assert everything(module) == there
        ours.l1_unstructured(module, name, 0.5)
        train(module, torch.ones(2, 7) if name == "weight" else X)


def test_a_method_that_fails_on_the_second_of_two_parameters_leaves_both() -> None:
    model = nested()
    ours.l1_unstructured(model.a, "weight", 0.3)
    there = [everything(module) for module in (model.a, model.inner[1])]

    def second(_: Any, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        if t.shape == (3, 5):
            raise ZeroDivisionError("the user's own")
        return default_mask * 0

    pairs = [(model.a, "weight"), (model.a, "bias"), (model.inner[1], "weight")]
    with pytest.raises(ZeroDivisionError, match="the user's own"):
        ours.prune_each(pairs, user_method(ours, "global", second))
    assert [everything(module) for module in (model.a, model.inner[1])] == there
