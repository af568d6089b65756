"""Blocks run one by one give what the model gives, whole or sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.walk import Batch, Walk, spread
from distprune.collectives.communicator import Alone, communicator
from distprune.models.decoder_blocks import decoder_blocks
from tests.architectures import samples, tiny_model
from tests.worlds import all_raise, drawing

TOKENS = samples(5)


def block_outputs(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What every block puts out in an ordinary forward."""
    found: list[torch.Tensor] = []

    def hook(_: nn.Module, __: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(hook) for _, block in decoder_blocks(model)]
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def check_walk(walk: Walk, wanted: list[list[torch.Tensor]]) -> None:
    for index in range(len(walk.blocks)):
        with walk.block(index) as run:
            outputs = [run(i) for i in range(walk.num_batches)]
        assert all(torch.equal(output, of_sample[index]) for output, of_sample in zip(outputs, wanted, strict=True))
        walk.advance(index, Alone())


def kinds(walk: Walk) -> list[int]:
    """By block, the first one that is called by the same object."""
    return [[call is other for other in walk.batches[0].calls].index(True) for call in walk.batches[0].calls]


@pytest.mark.parametrize("offload", [False, True])
def test_hidden_states_stay_where_they_are_and_are_nobody_elses(offload: bool) -> None:
    model, batches = tiny_model("llama"), spread(TOKENS, SampleGroup())
    given: list[torch.Tensor] = []
    handle = decoder_blocks(model)[0][1].register_forward_pre_hook(lambda _, args: given.append(args[0]))
    walk = catch_inputs(model, batches, offload=offload)
    handle.remove()
    assert torch.equal(given[0], walk.hidden[0])
    before, places = given[0].clone(), [hidden.data_ptr() for hidden in walk.hidden]
    walk.advance(0, Alone())
    assert [hidden.data_ptr() for hidden in walk.hidden] == places
    assert torch.equal(given[0], before)


def test_a_block_may_put_out_another_width_and_dtype() -> None:
    class Block(nn.Module):
        def __init__(self, num_in: int, num_out: int) -> None:
            super().__init__()
            self.linear = nn.Linear(num_in, num_out)

        @override
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.linear(hidden.float())
            return output.double()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(97, 8)
            self.layers = nn.ModuleList([Block(8, 12), Block(12, 8)])

        @override
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            hidden: torch.Tensor = self.embed(input_ids)
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    model, batches = Model(), spread(TOKENS, SampleGroup())
    walk = catch_inputs(model, batches)
    check_walk(walk, [block_outputs(model, batch.inputs["input_ids"]) for batch in batches])
    assert [(hidden.shape[-1], hidden.dtype) for hidden in walk.hidden] == [(8, torch.float64)] * len(batches)


def alternating_model() -> nn.Module:
    of_layers: dict[str, Any] = {"layer_types": ["full_attention", "sliding_attention"] * 2, "num_hidden_layers": 4}
    return tiny_model("qwen2", **of_layers, use_sliding_window=True, sliding_window=4)


def test_blocks_of_two_kinds() -> None:
    model, batches = alternating_model(), spread(TOKENS, SampleGroup())
    walk = catch_inputs(model, batches)
    assert kinds(walk) == [0, 1, 0, 1]
    check_walk(walk, [block_outputs(model, batch.inputs["input_ids"]) for batch in batches])


def test_one_block_is_run_once_to_learn_how_all_are_called() -> None:
    model, num_runs = tiny_model("llama"), [0, 0, 0]
    blocks = decoder_blocks(model)
    for index, (_, block) in enumerate(blocks):

        def count(*_: Any, index: int = index) -> None:
            num_runs[index] += 1

        block.register_forward_pre_hook(count)
    catch_inputs(model, spread(TOKENS, SampleGroup()))
    assert num_runs == [1, 0, 0]  # by the first sample; the other blocks are stood in for
    assert [block for _, block in decoder_blocks(model)] == [block for _, block in blocks]


def test_bad_input() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="no calibration sample"):
        catch_inputs(model, [])
    with pytest.raises(ValueError, match="no decoder blocks in Linear"):
        catch_inputs(nn.Linear(2, 2), spread(TOKENS, SampleGroup()))


class Backwards(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order
        with drawing(0):
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def test_blocks_out_of_order() -> None:
    batch = Batch(range(1), {"x": torch.ones(1, 2)})
    with pytest.raises(ValueError, match=r"block 'layers.1' is called as number 1"):
        catch_inputs(Backwards([1, 0]), [batch])
    with pytest.raises(ValueError, match="ended after 1 of 2 decoder blocks"):
        catch_inputs(Backwards([0]), [batch])


def hidden_in_shards(_: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    catch_inputs(Backwards([0, 1]), [Batch(range(1), {"x": DTensor.from_local(torch.ones(1, 1, 2), mesh, [Shard(1)])})])


def test_hidden_states_are_plain() -> None:
    match = r"block 'layers.0' is called with hidden states laid out as \(Shard\(dim=1\),\)"
    all_raise(2, hidden_in_shards, kind=NotImplementedError, match=match)


def advance_with_nan(rank: int) -> None:
    model = Backwards([0, 1])
    walk = catch_inputs(model, [Batch(range(1), {"x": torch.full((1, 2), torch.nan if rank == 1 else 1.0)})])
    walk.advance(0, communicator())


def test_nan_is_an_error_on_all_ranks() -> None:
    match = "block 'layers.0' puts out NaN or Inf for calibration samples 0"
    all_raise(2, advance_with_nan, kind=ValueError, match=match)


class Shifted(nn.Module):
    """Between two blocks something is added to hidden states: to a copy, or in place."""

    def __init__(self, in_place: bool, shift: float) -> None:
        super().__init__()
        self.in_place, self.shift = in_place, shift
        with drawing(0):
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index == 2:
                x = x.add_(self.shift) if self.in_place else x + self.shift
            x = layer(x)
        return x


@pytest.mark.parametrize("in_place", [False, True])
def test_hidden_states_changed_between_blocks(in_place: bool) -> None:
    batch = Batch(range(1), {"x": torch.ones(1, 2)})
    with pytest.raises(ValueError, match=r"block 'layers.2' is not given what 'layers.1' puts out"):
        catch_inputs(Shifted(in_place, 1.0), [batch])
    assert len(catch_inputs(Shifted(in_place, 0.0), [batch]).blocks) == 3  # other tensors of the same values are fine
