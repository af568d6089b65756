"""Blocks run one by one give what the model gives, whole or sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from distprune import Unstructured
from distprune.calibration import Walk, catch_inputs, prune_blocks, spread
from distprune.collectives import Alone, communicator, lookup_rows
from distprune.masks import reset_forward
from distprune.shards import decoder_blocks
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.worlds import ProcessPool, run_threads
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
            outputs = [run(i) for i in range(walk.num_samples)]
        assert all(torch.equal(output, of_sample[index]) for output, of_sample in zip(outputs, wanted, strict=True))
        walk.advance(index, Alone())


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("architecture", ONE_SHOT_ARCHITECTURES)
def test_every_architecture(architecture: str, offload: bool) -> None:
    model, batches = tiny_model(architecture), spread(TOKENS, 0, 1).batches
    walk = catch_inputs(model, batches, offload=offload)
    assert walk.kinds == [0] * len(walk.blocks)
    check_walk(walk, [block_outputs(model, batch["input_ids"]) for batch in batches])


@pytest.mark.parametrize("offload", [False, True])
def test_hidden_states_stay_where_they_are_and_are_nobody_elses(offload: bool) -> None:
    model, batches = tiny_model("llama"), spread(TOKENS, 0, 1).batches
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

    model, batches = Model(), spread(TOKENS, 0, 1).batches
    walk = catch_inputs(model, batches)
    check_walk(walk, [block_outputs(model, batch["input_ids"]) for batch in batches])
    assert [(hidden.shape[-1], hidden.dtype) for hidden in walk.hidden] == [(8, torch.float64)] * len(batches)


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
    model, batches = alternating_model(), spread(TOKENS, 0, 1).batches
    walk = catch_inputs(model, batches)
    assert walk.kinds == [0, 1, 0, 1]
    check_walk(walk, [block_outputs(model, batch["input_ids"]) for batch in batches])


def test_one_block_is_run_once_to_learn_how_all_are_called() -> None:
    model, num_runs = tiny_model("llama"), [0, 0, 0]
    blocks = decoder_blocks(model)
    for index, (_, block) in enumerate(blocks):

        def count(*_: Any, index: int = index) -> None:
            num_runs[index] += 1

        block.register_forward_pre_hook(count)
    catch_inputs(model, spread(TOKENS, 0, 1).batches)
    assert num_runs == [1, 0, 0]  # by the first sample; the other blocks are stood in for
    assert [block for _, block in decoder_blocks(model)] == [block for _, block in blocks]


def sharded(architecture: str, reshard_after_forward: bool) -> nn.Module:
    model = tiny_model(architecture)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for _, block in decoder_blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def walk_sharded(_: int, architecture: str, reshard_after_forward: bool) -> None:
    comm = communicator()
    plain, model = tiny_model(architecture), sharded(architecture, reshard_after_forward)
    batches = spread(TOKENS, comm.rank, comm.size).batches
    walk = catch_inputs(model, batches)
    check_sharded(model)
    wanted = [block_outputs(plain, batch["input_ids"]) for batch in batches]
    for index, (__, block) in enumerate(walk.blocks):
        with walk.block(index) as run:
            for i in range(walk.num_samples):
                assert torch.equal(run(i), wanted[i][index])
        check_sharded(block)
        walk.advance(index, comm)
        check_sharded(block)
    # A second walk sees what was written into the shards in between.
    with torch.no_grad():
        for parameters in (model.parameters(), plain.parameters()):
            for parameter in parameters:
                parameter.mul_(0.5)
    again = catch_inputs(model, batches)
    wanted = [block_outputs(plain, batch["input_ids"]) for batch in batches]
    for index in range(len(again.blocks)):
        again.advance(index, comm)
        assert all(torch.equal(h, of_sample[index]) for h, of_sample in zip(again.hidden, wanted, strict=True))
    # And the model runs as a whole.
    with torch.no_grad():
        one, other = (m(input_ids=TOKENS, use_cache=False).logits for m in (model, plain))
    assert torch.equal(one, other)


def check_sharded(module: nn.Module) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bloom", "mixtral"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_by_fsdp2(pool: ProcessPool, world_size: int, architecture: str, reshard_after_forward: bool) -> None:
    pool.run(world_size, walk_sharded, architecture, reshard_after_forward)


def shard_as(how: str, model: Any) -> None:
    """The ways in which people apply ``fully_shard`` to a Llama."""
    num_ranks = torch.distributed.get_world_size()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (num_ranks,))}
    if how == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("replicate", "shard"))
    if how == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if how == "by columns":
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.ndim - 1)
    if how == "embeddings apart":
        fully_shard(model.model.embed_tokens, **options)
        fully_shard([model.model.norm, model.lm_head], **options)
    for block in model.model.layers:
        if how in ("parts of blocks", "parts and blocks"):
            fully_shard(block.mlp, **options)
        if how not in ("root alone", "parts of blocks"):
            fully_shard(block, **options)
    if how == "inner model too":
        fully_shard(model.model, **options)
    fully_shard(model, **options)
    if how == "hooked":
        model.register_forward_pre_hook(lambda *_: None)


HOW = [
    "usual",
    "root alone",
    "inner model too",
    "embeddings apart",
    "parts of blocks",
    "parts and blocks",
    "hsdp",
    "bfloat16",
    "by columns",
    "hooked",
]
LOOKED_UP = {"usual", "parts and blocks", "hsdp", "bfloat16"}


def walk_sharded_as(rank: int, how: str) -> None:
    model: Any = tiny_model("llama")
    plain: Any = tiny_model("llama")
    shard_as(how, model)
    comm, batches = communicator(), spread(TOKENS, rank, torch.distributed.get_world_size()).batches
    embeddings: list[type] = []
    decoder_blocks(model)[0][1].register_forward_pre_hook(
        lambda *_: embeddings.append(type(model.get_input_embeddings().weight)), prepend=True
    )
    walk = catch_inputs(model, batches, comm=comm)
    assert (set(embeddings) == {DTensor}) == (how in LOOKED_UP | {"embeddings apart", "by columns"})
    assert comm.traffic.num_rounds == 3 * len(batches) * (how in LOOKED_UP) + (how == "by columns")
    check_sharded(model)
    wanted = [block_outputs(model, batch["input_ids"]) for batch in batches]
    reset_forward(model)
    for index, (_, block) in enumerate(walk.blocks):
        with walk.block(index) as run:
            assert all(torch.equal(run(i), wanted[i][index]) for i in range(walk.num_samples))
        check_sharded(block)
        walk.advance(index, comm)
        check_sharded(model)
    # The model can be trained afterwards, all ranks with the same samples.
    for of in (model, plain):
        of(input_ids=TOKENS, labels=TOKENS).loss.backward()
    exact = how != "bfloat16"
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-4 if exact else 1, atol=1e-6 if exact else 1e-2)


@pytest.mark.parametrize("how", HOW)
def test_every_way_to_apply_fsdp2(pool: ProcessPool, how: str) -> None:
    pool.run(4 if how == "hsdp" else 2, walk_sharded_as, how)


def prune_sharded_as(_: int, how: str) -> dict[str, torch.Tensor]:
    model = tiny_model("llama")
    shard_as(how, model)
    prune_blocks(model, TOKENS, method="wanda", pattern=Unstructured(0.5))
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("how", ["root alone", "parts of blocks", "by columns"])
def test_what_is_pruned_stays_pruned(pool: ProcessPool, how: str) -> None:
    """However blocks are gathered: what is written must be in the shards."""
    alone = tiny_model("llama")
    prune_blocks(alone, TOKENS, method="wanda", pattern=Unstructured(0.5))
    for found in pool.run(2, prune_sharded_as, how):
        assert all(torch.equal(found[name], parameter) for name, parameter in alone.named_parameters())


def catch_by_lookup(rank: int, architecture: str) -> None:
    """Embeddings of positions and norms of embeddings, too, wherever they are called."""
    plain, model = tiny_model(architecture), sharded(architecture, reshard_after_forward=True)
    batches = spread(TOKENS, rank, 2).batches
    one, other = catch_inputs(plain, batches), catch_inputs(model, batches)
    assert all(torch.equal(a, b) for a, b in zip(one.hidden, other.hidden, strict=True))


def test_lookups_of_every_architecture(pool: ProcessPool) -> None:
    for architecture in ONE_SHOT_ARCHITECTURES:
        pool.run(2, catch_by_lookup, architecture)


def lookup(rank: int, num_rows: int, dtype: torch.dtype) -> None:
    comm, group = communicator(), torch.distributed.group.WORLD
    assert group is not None
    matrix = torch.arange(num_rows * 3).view(num_rows, 3).to(dtype)
    step = -(-num_rows // 3)
    local = matrix[rank * step : (rank + 1) * step]
    for indices in ([], [0], list(range(num_rows)), list(range(0, num_rows, 2 + rank)), [num_rows - 1] * (rank < 2)):
        before = comm.traffic.copy()
        found = lookup_rows(comm, group, local, num_rows, torch.tensor(indices, dtype=torch.int64))
        assert torch.equal(found, matrix[indices])
        assert found.dtype == dtype
        assert (comm.traffic - before).num_rounds == 3
    with pytest.raises(IndexError, match=f"of a matrix of {num_rows} rows"):
        lookup_rows(comm, group, local, num_rows, torch.tensor([0, num_rows]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 7, 9])
def test_rows_are_looked_up_where_they_are(num_rows: int, dtype: torch.dtype) -> None:
    run_threads(3, lookup, num_rows, dtype)


def test_bad_input() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="no calibration sample"):
        catch_inputs(model, [])
    with pytest.raises(ValueError, match="no decoder blocks in Linear"):
        catch_inputs(nn.Linear(2, 2), [{"input": torch.ones(1, 2)}])


class Backwards(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def test_blocks_out_of_order() -> None:
    batch = {"x": torch.ones(1, 2)}
    with pytest.raises(ValueError, match=r"block 'layers.1' is called as number 1"):
        catch_inputs(Backwards([1, 0]), [batch])
    with pytest.raises(ValueError, match="ended after 1 of 2 decoder blocks"):
        catch_inputs(Backwards([0]), [batch])


def hidden_in_shards(_: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    catch_inputs(Backwards([0, 1]), [{"x": DTensor.from_local(torch.ones(1, 1, 2), mesh, [Shard(1)])}])


def test_hidden_states_are_plain() -> None:
    for error in run_threads(2, hidden_in_shards, catch=True):
        assert isinstance(error, NotImplementedError)
        assert "block 'layers.0' is called with hidden states laid out as (Shard(dim=1),)" in str(error)


def advance_with_nan(rank: int) -> None:
    model = Backwards([0, 1])
    walk = catch_inputs(model, [{"x": torch.full((1, 2), torch.nan if rank == 1 else 1.0)}])
    walk.advance(0, communicator())


def test_nan_is_an_error_on_all_ranks() -> None:
    for error in run_threads(2, advance_with_nan, catch=True):
        assert isinstance(error, ValueError)
        assert "block 'layers.0' puts out NaN or Inf for 1 of this rank's 1 samples" in str(error)
