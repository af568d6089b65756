"""What one rank raises in a pass over a sharded model, all raise, at once; or it is out of step, and says so alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import distprune as prune
from distprune.collectives.base import cannot_meet
from distprune.evaluation import log_likelihoods
from distprune.models.decoder_blocks import decoder_blocks
from distprune.removal.layers import order_layers
from distprune.removal.shrink_model import shrink_model
from distprune.shards.layouts import local_of
from tests.architectures import samples, tiny_model
from tests.oneshot.test_tensor_parallel import parallelized
from tests.test_evaluation import ragged
from tests.worlds import ProcessPool

TOKENS = samples(3)
CALLS: dict[str, Callable[[nn.Module], object]] = {
    "perplexity": lambda model: prune.perplexity(model, TOKENS.flatten(), sequence_length=8, batch_tokens=8),
    "log_likelihoods": lambda model: log_likelihoods(model, ragged(), batch_tokens=16).tolist(),
    "allocate": lambda model: prune.allocate(model, TOKENS, 0.5),
    "own_words": lambda model: prune.own_words(model, 4, 6, cache_memory=1),  # one at a time, gathered block by block
    "order_layers": lambda model: order_layers(model, TOKENS, 1),
    "shrink_model": lambda model: shrink_model(model, TOKENS, layers=1),
}
WALK = partial(prune.prune_blocks, samples=TOKENS, sparsity=0.5, epochs=1)
# Where, and whether in the backward pass.
PLACES = {
    "the embedding": ("model.embed_tokens", False),
    "attention": ("model.layers.1.self_attn.q_proj", False),  # before what FSDP2 gathers in the same block
    "the MLP": ("model.layers.1.mlp.down_proj", False),
    "the head": ("lm_head", False),
    "backward of the head": ("lm_head", True),
    "backward of the MLP": ("model.layers.1.mlp.down_proj", True),
    "backward of attention": ("model.layers.1.self_attn.q_proj", True),
}
AT_ONCE = 10.0  # seconds; a group's timeout is 120


def nested() -> nn.Module:
    model = tiny_model("llama")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for _, block in decoder_blocks(model):
        fully_shard(cast(nn.Module, block.mlp), mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def boom(*_: object) -> None:
    raise OSError("boom")


def fail_at(model: nn.Module, place: str) -> torch.utils.hooks.RemovableHandle:
    name, is_backward = PLACES[place]
    module = model.get_submodule(name)
    if not is_backward:
        return module.register_forward_pre_hook(boom)
    return module.register_forward_hook(lambda _, __, output: output.register_hook(boom) and None)


def raised_by(call: Callable[[nn.Module], object], model: nn.Module) -> tuple[str, bool, float]:
    """Return what it raised, whether the ranks could not meet, and after how many seconds."""
    started = time.perf_counter()
    try:
        call(model)
    except Exception as error:
        return str(error), cannot_meet(error), time.perf_counter() - started
    return "nothing", False, 0.0


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return those of a step of training, which FSDP2 reduces at the end of the backward pass, too."""
    model.zero_grad()
    model(input_ids=TOKENS).logits.square().mean().backward()
    return [local_of(cast(torch.Tensor, parameter.grad)).clone() for parameter in model.parameters()]


def told_on_rank(rank: int, call: str, places: list[str]) -> list[tuple[str, bool, float]]:
    model = nested()
    trained, before = gradients(model), CALLS["perplexity"](model)
    found = []
    for place in places:
        handle = fail_at(model, place) if rank == 1 else None
        found.append(raised_by(CALLS[call], model))
        if handle is not None:
            handle.remove()
        assert all(map(torch.equal, gradients(model), trained))
        assert CALLS["perplexity"](model) == before
    return found


@pytest.mark.parametrize("call", CALLS)
def test_all_raise_wherever_one_fails(pool: ProcessPool, call: str) -> None:
    places = [place for place, (_, is_backward) in PLACES.items() if call == "allocate" or not is_backward]
    first, second = pool.run(2, told_on_rank, call, places)
    for place, (told, *_), (said, could_not_meet, seconds) in zip(places, first, second, strict=True):
        assert (told, said, could_not_meet) == ("rank 1 of 2: boom", "boom", False), place
        assert seconds < AT_ONCE


def gathering_fails_on_rank(rank: int, call: str, name: str) -> tuple[str, bool, float]:
    model = nested()
    if rank == 1:
        model.get_submodule(name).register_forward_pre_hook(boom, prepend=True)  # before FSDP2's
    return raised_by(CALLS[call], model)


def layers_fail_on_rank(rank: int, call: str, name: str, number: int = 0) -> tuple[str, bool, float]:
    """Call what fails on one rank where layer ``name`` runs for the time of that ``number``."""
    mesh, runs = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), itertools.count()
    _set_pg_timeout(timedelta(seconds=2))  # DTensor's caches would keep the group of the rank that fails
    model = parallelized("llama", mesh)
    if rank == 1:
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda *_: boom() if next(runs) == number else None)
    return raised_by(WALK if call == "a walk" else CALLS[call], model)


OUT_OF_STEP: dict[str, tuple[Callable[..., object], str]] = {
    "the root is gathered": (gathering_fails_on_rank, ""),
    "an MLP is gathered": (gathering_fails_on_rank, "model.layers.1.mlp"),
    "layers communicate": (layers_fail_on_rank, "model.layers.1.self_attn.q_proj"),
    "layers communicate to learn": (layers_fail_on_rank, "model.layers.0.self_attn.q_proj"),
    "layers communicate past blocks": (layers_fail_on_rank, "lm_head"),
}


@pytest.mark.parametrize(
    ("call", "where"),
    [
        *itertools.product(["perplexity", "allocate"], list(OUT_OF_STEP)[:3]),
        # A walk gathers before it runs what is a user's.
        pytest.param("order_layers", "layers communicate", marks=pytest.mark.whole),
        ("order_layers", "layers communicate to learn"),
        ("order_layers", "layers communicate past blocks"),
    ],
)
def test_what_is_out_of_step_is_raised_at_once(pool: ProcessPool, call: str, where: str) -> None:
    """The rank that failed takes its group down with it, and that the other sees; or it has its timeout."""
    fails, name = OUT_OF_STEP[where]
    (_, other_could_not, _), (said, could_not_meet, seconds) = pool.run(2, fails, call, name)
    assert (said, could_not_meet) == ("boom", True)
    assert other_could_not
    assert seconds < AT_ONCE


@pytest.mark.parametrize(
    "number",
    [1, 3, 9, *(pytest.param(number, marks=pytest.mark.whole) for number in range(10) if number not in (1, 3, 9))],
)
def test_a_walk_whose_layers_communicate(pool: ProcessPool, number: int) -> None:
    """Wherever a block runs: to learn the order of its layers, for their statistics, and around and in its fit."""
    arguments = "a walk", "model.layers.0.self_attn.q_proj", number
    (_, other_could_not, _), (said, could_not_meet, seconds) = pool.run(2, layers_fail_on_rank, *arguments)
    assert (said, could_not_meet) == ("boom", True)
    assert other_could_not
    assert seconds < AT_ONCE


def cut_logits_on_rank(_: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(parallelized("llama", mesh), mesh, {"lm_head": ColwiseParallel()})  # torch's default
    return [raised_by(CALLS[call], model)[0] for call in ("perplexity", "allocate", "own_words", "order_layers")]


def test_logits_that_are_cut_are_refused(pool: ProcessPool) -> None:
    """Half of the vocabulary has a loss, too, where all tokens are in it."""
    for said in itertools.chain(*pool.run(2, cut_logits_on_rank)):
        assert "on this rank; let the tensor-parallel plan replicate them" in said


def callback_fails_on_rank(rank: int) -> tuple[str, bool, float]:
    model = parallelized("llama", init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    progress = boom if rank == 1 else None
    return raised_by(lambda model: prune.allocate(model, TOKENS, 0.5, progress=progress), model)


def test_between_passes_all_are_told_though_layers_communicate(pool: ProcessPool) -> None:
    (told, *of_first), (said, *of_second) = pool.run(2, callback_fails_on_rank)
    assert (told, said, of_first[0], of_second[0]) == ("rank 1 of 2: boom", "boom", False, False)


def fsdp1_on_rank(rank: int) -> tuple[str, bool, float]:
    model = FullyShardedDataParallel(
        tiny_model("llama"), auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.device("cpu")
    )
    if rank == 1:
        model.get_submodule("_fsdp_wrapped_module.model.norm").register_forward_pre_hook(boom)
    return raised_by(CALLS["perplexity"], model)


def test_fsdp1(pool: ProcessPool) -> None:
    (told, *_), (said, could_not_meet, seconds) = pool.run(2, fsdp1_on_rank)
    assert (told, said, could_not_meet) == ("rank 1 of 2: boom", "boom", False)
    assert seconds < AT_ONCE
