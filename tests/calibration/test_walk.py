"""Blocks run one by one give what the model gives, however FSDP2 is applied to it, and leave it as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from distprune import Unstructured
from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.walk import Batch, Walk, spread
from distprune.collectives.communicator import Alone, communicator
from distprune.collectives.guarded import Guarded
from distprune.models.decoder_blocks import decoder_blocks
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.shards.fsdp2_forward import reset_forward
from tests.architectures import samples, tiny_model
from tests.worlds import ProcessPool, all_raise, drawing
from tests.wrapped import whole

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


def alternating_model() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=4,
        use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention"] * 2,
    )
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def test_blocks_of_two_kinds() -> None:
    model, batches = alternating_model(), spread(TOKENS, SampleGroup())
    walk = catch_inputs(model, batches)
    calls = walk.batches[0].calls
    assert [[call is other for other in calls].index(True) for call in calls] == [0, 1, 0, 1]
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


def test_a_block_may_put_out_another_width_and_dtype() -> None:
    model, x = Backwards([0, 1]), torch.ones(1, 2)
    with drawing(0):
        first, second = nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(3, 2, dtype=torch.float64))
    first.register_forward_hook(lambda _, __, output: output.double())
    model.layers = nn.ModuleList([first, second])
    walk = catch_inputs(model, [Batch(range(1), {"x": x})])
    check_walk(walk, [[first(x), second(first(x))]])
    assert (walk.hidden[0].shape, walk.hidden[0].dtype) == ((1, 2), torch.float64)


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


def shard_as(how: str, model: Any) -> None:
    """The ways in which people apply ``fully_shard``; most of them are a Llama's."""
    shard: Any = replicate if how == "replicated" else fully_shard
    num_ranks = torch.distributed.get_world_size()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (num_ranks,))}
    if how == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("replicate", "shard"))
    if how == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if how == "by columns":
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.ndim - 1)
    if how == "embeddings apart":
        shard(model.model.embed_tokens, **options)
        shard([model.model.norm, model.lm_head], **options)
    for _, block in decoder_blocks(model):
        if how in ("parts of blocks", "parts and blocks"):
            shard(block.get_submodule("mlp"), **options)
        if how not in ("root alone", "parts of blocks"):
            shard(block, **options, **({"reshard_after_forward": False} if how == "kept gathered" else {}))
    if how == "inner model too":
        shard(model.model, **options)
    shard(model, **options)
    if how == "hooked":
        model.register_forward_pre_hook(lambda *_: None)


HOW = [
    "usual",
    "kept gathered",
    "root alone",
    "inner model too",
    "embeddings apart",
    "parts of blocks",
    "parts and blocks",
    "hsdp",
    "bfloat16",
    "by columns",
    "hooked",
    "replicated",
]
CASES = [
    *((4 if how == "hsdp" else 2, how, "llama") for how in HOW),
    *((3, how, architecture) for how in HOW[:2] for architecture in ("gpt2", "bloom", "mixtral")),
]


def walk_sharded(rank: int, how: str, architecture: str) -> None:
    model: Any = tiny_model(architecture)
    plain: Any = tiny_model(architecture)
    shard_as(how, model)
    comm, is_exact = communicator(), how != "bfloat16"
    batches = spread(TOKENS, SampleGroup(rank, comm.size))
    for _ in range(2):  # a second walk sees what was written into the shards in between
        before = comm.traffic.copy()
        walk = catch_inputs(model, batches, comm=Guarded(comm))
        assert (comm.traffic - before).num_rounds == len(batches) + 1
        check_sharded(model)
        reference = plain if is_exact else model
        wanted = [block_outputs(reference, batch.inputs["input_ids"]) for batch in batches]
        reset_forward(model)
        for index, (__, block) in enumerate(walk.blocks):
            with walk.block(index) as run:
                assert all(torch.equal(run(i), wanted[i][index]) for i in range(walk.num_batches))
            check_sharded(block)
            walk.advance(index, comm)
            check_sharded(model)
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(0.5)
    # The model can be trained afterwards, all ranks with the same samples.
    losses = [each(input_ids=TOKENS, labels=TOKENS).loss for each in (model, plain)]
    assert not is_exact or torch.equal(*losses)
    for loss in losses:
        loss.backward()
    rtol, atol = (1e-4, 1e-6) if is_exact else (1.0, 1e-2)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad, rtol=rtol, atol=atol)
    for each in (model, plain) if is_exact else ():  # what is written must be in the shards
        prune_blocks(each, TOKENS, method="wanda", pattern=Unstructured(0.5))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert not is_exact or torch.equal(whole(one), other)


def check_sharded(module: nn.Module) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())


@pytest.mark.parametrize(("world_size", "how", "architecture"), CASES)
@pytest.mark.sampled(5)
def test_every_way_to_apply_fsdp2(pool: ProcessPool, world_size: int, how: str, architecture: str) -> None:
    pool.run(world_size, walk_sharded, how, architecture)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 50))
def test_every_part_has_as_many_batches(num_samples: int, num_parts: int, batch_tokens: int) -> None:
    token_ids = torch.arange(num_samples * 4).view(num_samples, 4)
    parts = [spread(token_ids, SampleGroup(part, num_parts), batch_tokens) for part in range(num_parts)]
    assert len({len(batches) for batches in parts}) == 1
    together = [batch.windows for batches in parts for batch in batches]
    assert sorted(number for windows in together for number in windows) == list(range(num_samples))
    assert all(len(windows) <= max(batch_tokens // 4, 1) for windows in together)
    for batches in parts:
        num_counted = sum(bool(batch.windows) for batch in batches)
        for batch in batches[:num_counted]:
            assert torch.equal(batch.inputs["input_ids"], token_ids[list(batch.windows)])
        assert all(len(batch.inputs["input_ids"]) == 1 for batch in batches[num_counted:])  # padding
