"""Blocks run one by one give what the model gives, however FSDP2 is applied to it, and leave it as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from distprune import Unstructured
from distprune.calibration.catch_inputs import catch_inputs
from distprune.calibration.sample_group import SampleGroup
from distprune.calibration.walk import spread
from distprune.collectives.communicator import communicator
from distprune.collectives.guarded import Guarded
from distprune.models.decoder_blocks import decoder_blocks
from distprune.oneshot.prune_blocks import prune_blocks
from distprune.shards.fsdp2_forward import reset_forward
from tests.architectures import ONE_SHOT_ARCHITECTURES, samples, tiny_model
from tests.calibration.test_walk import block_outputs
from tests.worlds import ProcessPool
from tests.wrapped import whole

TOKENS = samples(5)


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


def check_sharded(module: nn.Module) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())


@pytest.mark.parametrize(("world_size", "how", "architecture"), CASES)
@pytest.mark.sampled(5)
def test_every_way_to_apply_fsdp2(pool: ProcessPool, world_size: int, how: str, architecture: str) -> None:
    pool.run(world_size, walk_sharded, how, architecture)


def prune_sharded_as(_: int, how: str) -> dict[str, torch.Tensor]:
    model = tiny_model("llama")
    shard_as(how, model)
    prune_blocks(model, TOKENS, method="wanda", pattern=Unstructured(0.5))
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("how", ["root alone", "parts of blocks", "by columns", "replicated"])
@pytest.mark.sampled(2)
def test_what_is_pruned_stays_pruned(pool: ProcessPool, how: str) -> None:
    """However blocks are gathered: what is written must be in the shards."""
    alone = tiny_model("llama")
    prune_blocks(alone, TOKENS, method="wanda", pattern=Unstructured(0.5))
    for found in pool.run(2, prune_sharded_as, how):
        assert all(torch.equal(found[name], parameter) for name, parameter in alone.named_parameters())


def catch_sharded(rank: int, architecture: str) -> None:
    """What is around the blocks is gathered: embeddings of positions and norms of embeddings, too."""
    plain, model = tiny_model(architecture), tiny_model(architecture)
    shard_as("usual", model)
    one, other = (catch_inputs(each, spread(TOKENS, SampleGroup(rank, 2))) for each in (plain, model))
    assert all(torch.equal(a, b) for a, b in zip(one.hidden, other.hidden, strict=True))


def test_every_architecture_sharded(pool: ProcessPool) -> None:
    for architecture in ONE_SHOT_ARCHITECTURES:
        pool.run(2, catch_sharded, architecture)
