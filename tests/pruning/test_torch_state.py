"""A pruned plain module lives as PyTorch's does: trained, copied, saved, tied, compiled, pruned by users' methods."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from tests.pruning.test_torch_parity import (
    Act,
    assert_all_bits,
    assert_bits,
    made,
    ours,
    theirs,
)

BOTH = (ours, theirs)


def train(module: Any, *x: torch.Tensor, steps: int = 3, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        out = module(*x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        optimizer.step()


def nested() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(a=nn.Linear(4, 5), inner=nn.Sequential(nn.ReLU(), nn.Linear(5, 3))))


def lstm() -> Any:
    torch.manual_seed(0)
    return nn.LSTM(4, 3, num_layers=2)


def prune_nested(p: Any, m: Any) -> None:
    p.l1_unstructured(m.a, "weight", 0.4)
    p.l1_unstructured(m.a, "bias", 2)
    p.ln_structured(m.inner[1], "weight", 1, 2, 0)
    p.l1_unstructured(m.inner[1], "weight", 0.2)


def prune_lstm(p: Any, m: Any) -> None:
    p.l1_unstructured(m, "weight_ih_l0", 0.4)
    p.ln_structured(m, "weight_hh_l1", 0.4, 2, 0)
    p.l1_unstructured(m, "bias_hh_l0", 5)
    p.l1_unstructured(m, "weight_ih_l0", 0.1)


X = torch.linspace(-1, 1, 24).view(6, 4)
PRUNED: dict[str, tuple[Callable[[], Any], Act]] = {"nested": (nested, prune_nested), "lstm": (lstm, prune_lstm)}


def output(module: Any) -> torch.Tensor:
    result = module(X)
    tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tensor.detach()


def test_the_original_is_the_same_object_all_along() -> None:
    module = made("linear")
    kind, weight, others = type(module), module.weight, set(vars(module))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    ours.l1_unstructured(module, "weight", 0.5)
    ours.ln_structured(module, "weight", 1, 2, 0)
    assert isinstance(module, kind)
    assert module.weight_orig is weight
    assert "weight" not in dict(module.named_parameters())
    before, mask = weight.detach().clone(), module.weight_mask.clone()
    train(module, torch.ones(2, 7), optimizer=optimizer)
    assert torch.equal(weight == before, mask == 0)
    assert ours.remove(module, "weight") is module
    assert module.weight is weight
    assert weight.is_leaf
    assert weight.requires_grad
    assert torch.equal(weight, weight * mask)
    assert type(module) is kind
    assert set(vars(module)) == others
    assert [*module._forward_hooks, *module._forward_pre_hooks, *module.buffers()] == []
    assert not module._forward_hooks_always_called
    train(module, torch.ones(2, 7), optimizer=optimizer)
    assert not torch.equal(weight, weight * mask)


@pytest.mark.parametrize("kind", PRUNED)
def test_training_and_removal_equal_pytorch(kind: str) -> None:
    make, prune = PRUNED[kind]
    built = []
    for p in BOTH:
        module = make()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        prune(p, module)
        train(module, X, optimizer=optimizer)
        built.append(module)
    mine, expected = built
    assert_all_bits(mine.state_dict(), expected.state_dict())
    assert_bits(output(mine), output(expected))
    for p, module in zip(BOTH, built, strict=True):
        for part in list(module.modules()):
            names = [name.removesuffix("_orig") for name in part._parameters if name.endswith("_orig")]
            for name in names:
                p.remove(part, name)
        assert not p.is_pruned(module)
    assert_all_bits(mine.state_dict(), expected.state_dict())
    assert_bits(output(mine), output(expected))
    assert [type(m) for m in mine.modules()] == [type(m) for m in expected.modules()]
    for module in built:
        train(module, X)
    assert_bits(output(mine), output(expected))


def through_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def through_torch(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "save": through_torch,
    "twice": lambda module: through_pickle(copy.deepcopy(module)),
}


@pytest.mark.parametrize("after_forward", [False, True])
@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("kind", PRUNED)
@pytest.mark.sampled(8)
def test_copies_live_on_their_own(kind: str, copied: str, after_forward: bool) -> None:
    make, prune = PRUNED[kind]
    module = make()
    prune(ours, module)
    if after_forward:
        train(module, X)
    twin = COPIES[copied](module)
    saved = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    wanted = output(module)
    assert_all_bits(twin.state_dict(), saved)
    assert_bits(output(twin), wanted)
    assert not {id(t) for t in (*twin.parameters(), *twin.buffers())} & {id(t) for t in module.parameters()}
    assert [type(m) for m in twin.modules()] == [type(m) for m in module.modules()]
    # The copy is trained and pruned on, and the original stays; then the original, which does the same.
    for each in (twin, module):
        train(each, X)
        prune(ours, each)
        train(each, X)
        if each is twin:
            assert_all_bits(module.state_dict(), saved)
            assert_bits(output(module), wanted)
    assert_all_bits(twin.state_dict(), module.state_dict())
    assert_bits(output(twin), output(module))
    for each in (twin, module):
        for part in each.modules():
            for name in [name.removesuffix("_orig") for name in part._parameters if name.endswith("_orig")]:
                ours.remove(part, name)
    assert_all_bits(twin.state_dict(), module.state_dict())
    assert [type(m) for m in twin.modules()] == [type(m) for m in make().modules()]
    assert_bits(output(twin), output(module))


@pytest.mark.parametrize("kind", PRUNED)
def test_a_state_dict_goes_into_a_module_with_other_masks(kind: str) -> None:
    make, prune = PRUNED[kind]
    source, target, pytorch = make(), make(), make()
    for p, module in ((ours, source), (ours, target), (theirs, pytorch)):
        prune(p, module)
    train(source, X)
    for part in target.modules():
        for name in [name for name in part._buffers if name.endswith("_mask")]:
            ours.custom_from_mask(part, name.removesuffix("_mask"), torch.zeros_like(part._buffers[name]))
    for module in (target, pytorch):
        assert not torch.equal(output(module), output(source))
        module.load_state_dict(source.state_dict())
        assert_bits(output(module), output(source))
        train(module, X)
    assert_all_bits(target.state_dict(), pytorch.state_dict())
    torch.testing.assert_close(target.state_dict(), pytorch.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("make", [lambda: nn.LSTM(4, 3, bidirectional=True), lambda: nn.GRU(4, 3)], ids=["lstm", "gru"])
def test_recurrent_weights_equal_pytorch(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    whole = make()
    mine, expected = copy.deepcopy(whole), copy.deepcopy(whole)
    weights = [mine.weight_ih_l0, mine.weight_hh_l0]
    for p, module in zip(BOTH, (mine, expected), strict=True):
        p.l1_unstructured(module, "weight_ih_l0", 0.5)
        p.global_unstructured([(module, n) for n in ("weight_ih_l0", "weight_hh_l0")], p.L1Unstructured, amount=0.3)
        train(module, X)
    assert_bits(output(mine), output(expected))
    assert_all_bits(mine.state_dict(), expected.state_dict())
    for p, module in zip(BOTH, (mine, expected), strict=True):
        p.remove(module, "weight_ih_l0")
        train(module, X)
        p.remove(module, "weight_hh_l0")
        train(module, X)
    assert mine.weight_ih_l0 is weights[0]
    assert mine.weight_hh_l0 is weights[1]
    assert type(mine) is type(whole)
    assert_bits(output(mine), output(expected))
    assert_all_bits(mine.state_dict(), expected.state_dict())
    assert all(a is b for a, b in zip(mine._flat_weights, mine.all_weights[0], strict=False))


def test_tied_parameters_behave_as_in_pytorch() -> None:
    def build(p: Any, *pruned: int) -> Any:
        model = nn.Sequential(*[made("linear", seed=i) for i in range(2)])
        model[1].weight = model[0].weight
        for i in pruned:
            p.l1_unstructured(model[i], "weight", 0.3 + 0.2 * i)
        out = model[0](torch.ones(2, 7)) + model[1](torch.ones(2, 7))
        out.square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return model

    for pruned in ((0,), (1,), (0, 1)):
        mine, expected = build(ours, *pruned), build(theirs, *pruned)
        assert_all_bits(mine.state_dict(), expected.state_dict())
        assert_all_bits(dict(mine.named_parameters()), dict(expected.named_parameters()))
        shared = [m._parameters.get("weight_orig", m._parameters.get("weight")) for m in mine]
        assert shared[0] is shared[1]
        for i in pruned:
            ours.remove(mine[i], "weight")
            theirs.remove(expected[i], "weight")
        assert mine[0].weight is mine[1].weight
        assert_all_bits(mine.state_dict(), expected.state_dict())


def test_frozen_parameters_stay_frozen() -> None:
    module = made("linear").requires_grad_(False)
    mine, expected = copy.deepcopy(module), copy.deepcopy(module)
    for p, m in zip(BOTH, (mine, expected), strict=True):
        p.l1_unstructured(m, "weight", 0.5)
        p.ln_structured(m, "weight", 1, 2, 0)
        assert not m(torch.ones(2, 7)).requires_grad
        assert not m.weight_orig.requires_grad
    assert_all_bits(mine.state_dict(), expected.state_dict())
    assert not mine.weight.requires_grad
    ours.remove(mine, "weight")
    assert not mine.weight.requires_grad


def test_the_product_is_never_stale() -> None:
    """PyTorch's is what it was at the last forward."""
    module = made("linear")
    ours.l1_unstructured(module, "weight", 0.5)
    for change in (
        lambda: train(module, torch.ones(2, 7)),
        lambda: module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()}),
        lambda: module.weight_mask.zero_(),
        lambda: module.double(),
        lambda: nn.init.normal_(module.weight_orig),
    ):
        change()
        assert_bits(module.weight, module.weight_mask * module.weight_orig)
        assert "weight" not in vars(module)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.ones(2, 3, dtype=torch.float64))
    assert "weight" not in vars(module)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.sampled(1)
def test_compiled_equals_eager(backend: str) -> None:
    eager = nested()
    prune_nested(ours, eager)
    compiled_twin = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(compiled_twin, backend=backend)
    for _ in range(2):
        assert_bits(output(compiled), output(eager))
        train(compiled, X, steps=2)
        train(eager, X, steps=2)
    assert_all_bits(compiled_twin.state_dict(), eager.state_dict())
    ours.l1_unstructured(compiled_twin.a, "weight", 0.5)
    ours.l1_unstructured(eager.a, "weight", 0.5)
    assert_bits(output(compiled), output(eager))
    torch._dynamo.reset()


def test_a_copy_within_forward_has_no_product_of_its_own() -> None:
    class Copying(nn.Linear):
        copied: nn.Module

        @override
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.copied = copy.deepcopy(self)
            return super().forward(input)

    module = Copying(5, 4)
    ours.l1_unstructured(module, "weight", 0.5)
    module(torch.ones(2, 5))
    assert "weight" not in vars(module.copied)
    assert_bits(module.copied.get_parameter("weight_orig"), module.get_parameter("weight_orig"))
