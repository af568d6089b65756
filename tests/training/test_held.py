"""What is held is read anew when the weights are written to, and gradients are masked once."""

from __future__ import annotations

import copy
import itertools
import tempfile
from typing import cast
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import distprune as prune
from distprune.masks import zero_where_pruned
from distprune.shards import gradients_of, local_of
from distprune.training import hold_zeros
from tests.training.optimizers import INCLUDE, check_moments, held_bits, targets
from tests.worlds import ProcessPool
from tests.wrapped import batches, transformer, wrap


def counted_on_rank(_: int, layout: str) -> None:
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    num_targets = len(targets(wrapped.model))
    written = next(p for name, p in wrapped.model.named_parameters() if name.endswith("attention.o.weight"))
    for is_written, tokens in zip((True, False, False, True), batches(4), strict=True):
        with patch("distprune.training.held.zero_where_pruned", wraps=zero_where_pruned) as masking:
            wrapped.step(tokens)
            assert masking.call_count == num_targets
            if is_written:
                local_of(cast(torch.Tensor, written.grad)).add_(1.0)
            before = masking.call_count
            optimizer.step()
            assert (masking.call_count > before) == is_written
        optimizer.zero_grad()
        check_moments(optimizer, wrapped.model)


@pytest.mark.parametrize("layout", ["plain", "fsdp2"])
def test_a_gradient_is_masked_once_unless_somebody_writes_to_it(pool: ProcessPool, layout: str) -> None:
    pool.run(1 if layout == "plain" else 2, counted_on_rank, layout)


def _in_place(model: nn.Module, moved: list[torch.Tensor]) -> None:
    for shard, values in zip(targets(model), moved, strict=True):
        shard.local.copy_(values)


def _through_data(model: nn.Module, moved: list[torch.Tensor]) -> None:
    for shard, values in zip(targets(model), moved, strict=True):
        shard.local.data.copy_(values)


def _loaded(model: nn.Module, moved: list[torch.Tensor]) -> None:
    state = copy.deepcopy(model.state_dict())
    for shard, values in zip(targets(model), moved, strict=True):
        local_of(state[shard.name]).copy_(values)
    model.load_state_dict(state)


def _loaded_in_place(model: nn.Module, moved: list[torch.Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a rank writes and reads its own
        state = {shard.name: values for shard, values in zip(targets(model), moved, strict=True)}
        save(state, checkpoint_id=folder, no_dist=True)
        load({name: local_of(model.state_dict()[name]) for name in state}, checkpoint_id=folder, no_dist=True)


WRITES = {"in place": _in_place, "through data": _through_data, "loaded": _loaded, "loaded in place": _loaded_in_place}


@torch.no_grad()
def _move_zeros(model: nn.Module, way: str) -> list[torch.Tensor]:
    """Write other weights with as many zeros in other places, and return where they are."""
    WRITES[way](model, [shard.local.roll(1, 0) for shard in targets(model)])
    return held_bits(model)


def written_on_rank(_: int, layout: str, way: str) -> None:
    wrapped = wrap(layout, transformer())
    optimizer = torch.optim.AdamW(wrapped.model.parameters(), lr=1e-2)
    prune.prune_model(wrapped.model, 0.5, include=INCLUDE)
    hold_zeros(wrapped.model, optimizer, include=INCLUDE)
    held = held_bits(wrapped.model)
    for i, tokens in enumerate(batches(6)):
        if i == 2:
            held = _move_zeros(wrapped.model, way)
        wrapped.step(tokens)
        if layout != "fsdp1":
            gradients = gradients_of(targets(wrapped.model), wrapped.model.parameters())
            assert [int((gradient != 0).sum()) for gradient in gradients if gradient is not None] == [
                int((~bits).sum()) for bits in held
            ]
        if i == 4:
            held = _move_zeros(wrapped.model, way)
        optimizer.step()
        assert all(map(torch.equal, held_bits(wrapped.model), held))
        check_moments(optimizer, wrapped.model)
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("layout", "way"),
    [
        *itertools.product(["plain", "fsdp2"], WRITES),
        ("fsdp1", "in place"),  # its state dict is not of shards
        ("fsdp1", "through data"),
    ],
)
@pytest.mark.sampled(5)
def test_what_is_written_between_steps(pool: ProcessPool, layout: str, way: str) -> None:
    pool.run(1 if layout == "plain" else 2, written_on_rank, layout, way)


def by_hand_on_rank(_: int, is_sharded: bool) -> None:
    model = nn.Linear(300, 300)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hold_zeros(model, optimizer)

    def steps_hold() -> None:
        bits = local_of(model.weight).detach().view(torch.int32)  # a kept weight that becomes zero is -0.0
        held = bits == 0
        for _ in range(2):
            model(torch.randn(4, 300)).sum().backward()
            optimizer.step()
            assert torch.equal(bits == 0, held)

    with torch.no_grad():
        for smallest in (0.01, 0.2):  # each shows in the sample
            local_of(model.weight).data.masked_fill_(local_of(model.weight).abs() < smallest, 0)
            with torch.enable_grad():
                steps_hold()
        changed = model.weight.clone()
        local_of(changed)[0, 1:3] = 0  # a sample does not look at these
        model.weight.copy_(changed)
    steps_hold()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_zeros_written_by_hand(pool: ProcessPool, is_sharded: bool) -> None:
    """torch counts no write to ``data``, and of a large weight only a sample is looked at before a step."""
    pool.run(1 + is_sharded, by_hand_on_rank, is_sharded)
