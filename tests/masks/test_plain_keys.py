"""State dicts with the keys of a model that was never pruned: in every layout, to and from other models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import distprune as prune
from tests.contract import REPARAMETRIZED
from tests.worlds import ProcessPool, drawing
from tests.wrapped import WRAPPERS, Wrapped, batches, pairs_of, transformer, whole, wrap

Parameters = dict[str, torch.Tensor]


def pruned(wrapped: Wrapped) -> nn.Module:
    """Return the model pruned, with kept weights that are zero, after a forward."""
    prune.prune_each(pairs_of(wrapped.model), prune.L1Unstructured, amount=0.5)
    with torch.no_grad():
        pairs_of(wrapped.model)[0][0].get_parameter("weight_orig").mul_(0)
    wrapped.model(batches(1)[0])  # FSDP2 leaves some of it gathered
    return wrapped.model


def one_process() -> Parameters:
    return {name: whole(value) for name, value in prune.dense_state_dict(pruned(Wrapped(transformer(), 0, 1))).items()}


def dense_on_rank(_: int, layout: str) -> Parameters:
    model = pruned(wrap(layout, transformer()))
    state, dense = model.state_dict(), prune.dense_state_dict(model)
    prefix = "module." if layout == "ddp" else ""
    assert dense.keys() == {prefix + name for name in transformer().state_dict()}
    assert dense._metadata == state._metadata  # type: ignore[attr-defined]
    parameters = dict(model.named_parameters())
    for name, value in dense.items():
        parameter = parameters.get(name, parameters.get(f"{name}_orig"))
        assert parameter is not None
        assert type(value) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
        assert (value.shape, value.dtype, value.requires_grad) == (parameter.shape, parameter.dtype, False)
        local, own = (t.to_local() if isinstance(t, DTensor) else t for t in (value, parameter))
        assert local.shape == own.shape
        assert (local.data_ptr() == own.data_ptr()) == (name in state or not local.numel())  # only products are copies
    return {name.removeprefix(prefix): whole(value) for name, value in dense.items()}


CASES = [
    pytest.param(name, n, id=f"{name}-{n}")
    for column in REPARAMETRIZED
    for name, (_, world_sizes) in WRAPPERS[column].items()
    for n in world_sizes[-1:]
]


@pytest.mark.parametrize(("layout", "world_size"), CASES)
@pytest.mark.sampled(3)
def test_a_dense_state_dict_is_that_of_one_process(pool: ProcessPool, layout: str, world_size: int) -> None:
    expected = one_process()
    for got in pool.run(world_size, dense_on_rank, layout):
        for name, values in expected.items():
            assert torch.equal(got[name].view(torch.int32), values.view(torch.int32)), name


def test_values_are_the_products_and_their_zeros_are_the_mask() -> None:
    by: Any
    for by in (prune, torch_prune):
        layer: Any = nn.Linear(8, 6)
        nn.init.constant_(layer.weight[0], 0)  # kept, some of it
        by.custom_from_mask(layer, "weight", torch.arange(48).view(6, 8) % 3 != 0)
        dense = prune.dense_state_dict(layer)
        assert torch.equal(dense["weight"], layer.weight_orig * layer.weight_mask)
        assert torch.equal(dense["weight"].view(torch.int32) != 0, layer.weight_mask == 1)
        assert dense["bias"].data_ptr() == layer.bias.data_ptr()
        plain = nn.Linear(8, 6)
        plain.load_state_dict(dense)
        held = prune.hold_zeros(plain).counts().num_held  # the sign of a zero speaks from here on
        assert held == torch.count_nonzero(dense["weight"] == 0) == 16 + 5
    assert prune.dense_state_dict(nn.Linear(2, 2)).keys() == {"weight", "bias"}


def resumed_on_rank(_: int, layout: str) -> None:
    """Load plain keys into a pruned model in the same layout, and those of another mask."""
    model = pruned(wrap(layout, transformer()))
    dense = {name: value.clone() for name, value in prune.dense_state_dict(model).items()}
    masks = {name: whole(value) for name, value in model.state_dict().items() if name.endswith("_mask")}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    model.load_state_dict(dense)
    after = prune.dense_state_dict(model)
    assert all(torch.equal(whole(after[name]), whole(value)) for name, value in dense.items())
    assert all(torch.equal(whole(model.state_dict()[name]), mask) for name, mask in masks.items())
    for other, text in ((torch.ones_like, "is not 0 at [1-9]"), (torch.zeros_like, "and 0 at [1-9]")):
        changed = {name: other(value) if name.endswith("up.weight") else value for name, value in dense.items()}
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=text):
                model.load_state_dict(changed, strict=strict)


@pytest.mark.parametrize(("layout", "world_size"), [("plain", 1), ("ddp", 2), ("fsdp2", 2), ("tp", 2)])
@pytest.mark.sampled(2)
def test_plain_keys_are_taken_back_if_they_fit_the_mask(pool: ProcessPool, layout: str, world_size: int) -> None:
    pool.run(world_size, resumed_on_rank, layout)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.complex128])
def test_plain_keys_of_other_dtypes(dtype: torch.dtype) -> None:
    """Integers have no sign of a kept zero: it stays 0."""
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(torch.tensor([0, 1, 1, 0]).to(dtype), requires_grad=dtype.is_complex)
    prune.custom_from_mask(layer, "weight", torch.tensor([1, 1, 0, 0]))
    state = prune.dense_state_dict(layer)
    assert state["weight"].dtype is dtype
    assert torch.equal(state["weight"], torch.tensor([0, 1, 0, 0]).to(dtype))
    layer.load_state_dict(state)
    assert torch.equal(prune.dense_state_dict(layer)["weight"], state["weight"])


def test_plain_keys_that_cannot_be_compared_with_a_mask() -> None:
    layer = prune.custom_from_mask(nn.Linear(2, 2), "weight", torch.tensor([[1.0, 0.0], [0.5, 1.0]]))
    state = prune.dense_state_dict(layer)
    with pytest.raises(RuntimeError, match="values other than 0 and 1"):
        layer.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r"it has shape \(3, 2\), not \(2, 2\)"):
        layer.load_state_dict({"weight": torch.ones(3, 2)}, strict=False)
    with pytest.raises(RuntimeError, match="has no values yet"):
        layer.load_state_dict({"weight": torch.ones(2, 2, device="meta")}, strict=False)


def sharded_by_itself_on_rank(_: int) -> None:
    with drawing(0):
        layer = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.25)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    prune.shard_masks(layer)
    prune.l1_unstructured(layer, "weight", 0.25)
    state = layer.state_dict()
    assert sorted(state) == ["bias", "weight_mask", "weight_orig"]
    layer.load_state_dict(state)
    prune.remove(layer, "weight")
    assert sorted(layer.state_dict()) == ["bias", "weight"]
    layer.load_state_dict(layer.state_dict())


def test_a_layer_that_fsdp2_gives_a_class_of_its_own_after_it_was_pruned(pool: ProcessPool) -> None:
    pool.run(2, sharded_by_itself_on_rank)
