"""Pruned training in every layout is ``torch.nn.utils.prune``'s on one process with the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.distributed.fsdp import FSDPModule

import distprune as prune
from distprune.masks import fsdp2
from tests.contract import REPARAMETRIZED
from tests.worlds import ProcessPool
from tests.wrapped import WRAPPERS, batches, pairs_of, transformer, whole, wrap

NUM_STEPS = 4
Parameters = dict[str, torch.Tensor]


def prune_in_two_calls(model: nn.Module) -> None:
    prune.prune_each(pairs_of(model), prune.LnStructured, amount=2, n=2, dim=1)
    prune.prune_each(pairs_of(model), prune.L1Unstructured, amount=0.4)


@functools.cache
def one_process() -> Parameters:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for module, name in pairs_of(model):
        torch_prune.ln_structured(module, name, 2, n=2, dim=1)  # type: ignore[no-untyped-call]
        torch_prune.l1_unstructured(module, name, 0.4)  # type: ignore[no-untyped-call]
    for tokens in batches(NUM_STEPS):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_on_rank(_: int, layout: str) -> tuple[Parameters, list[int]]:
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)  # before pruning: it must go on working
    prune_in_two_calls(wrapped.model)
    num_zeros = []
    for i, tokens in enumerate(batches(NUM_STEPS)):
        wrapped.step(tokens)
        is_last = i == NUM_STEPS - 1  # to look at whole tensors takes longer than a step
        for module, _name in pairs_of(wrapped.model) if is_last else ():
            grad, mask = module.get_parameter("weight_orig").grad, whole(module.get_buffer("weight_mask"))
            assert grad is not None
            assert not whole(grad)[mask == 0].any()
        optimizer.step()
        optimizer.zero_grad()
        if is_last or i == 0:
            pruned = [whole(module.weight) for module, _name in pairs_of(wrapped.model)]  # type: ignore[arg-type]
            num_zeros.append(sum(int((weight == 0).sum()) for weight in pruned))
            if isinstance(wrapped.model, FSDPModule):
                wrapped.model.reshard()
    bare = getattr(wrapped.model, "module", wrapped.model)
    return {name: whole(parameter) for name, parameter in bare.named_parameters()}, num_zeros


CASES = [
    pytest.param(name, n, id=f"{name}-{n}", marks=() if n == world_sizes[0] else pytest.mark.whole)
    for column in REPARAMETRIZED
    for name, (_, world_sizes) in WRAPPERS[column].items()
    for n in world_sizes
]


@pytest.mark.parametrize(("layout", "world_size"), CASES)
@pytest.mark.sampled(2)
def test_equals_one_process(pool: ProcessPool, layout: str, world_size: int) -> None:
    expected = one_process()
    shapes = [module.get_parameter(name).shape for module, name in pairs_of(transformer())]
    num_pruned = sum(2 * rows + round(0.4 * rows * (columns - 2)) for rows, columns in shapes)
    for parameters, num_zeros in pool.run(world_size, train_on_rank, layout):
        assert num_zeros == [num_pruned] * 2
        assert parameters.keys() == expected.keys()
        for name, values in expected.items():
            assert torch.allclose(parameters[name], values, rtol=0, atol=1e-5), name


def test_the_product_is_made_on_the_device_that_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what FSDP2 offloads it would else lie in host memory that is not pinned, and its copy be waited for."""
    monkeypatch.setattr(fsdp2, "_local_mask", lambda _: torch.ones(2, 3, dtype=torch.uint8))
    monkeypatch.setattr(fsdp2, "_watch_gradient", lambda _: None)
    param: Any = fsdp2._MaskedParam.__new__(fsdp2._MaskedParam)
    param._sharded_param_data, param.offload_to_cpu, param.device = torch.ones(8), True, torch.device("meta")
    assert param._sharded_param_data.is_meta
